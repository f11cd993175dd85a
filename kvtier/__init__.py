"""kvtier: a KV-cache tiering engine for transformer inference."""
