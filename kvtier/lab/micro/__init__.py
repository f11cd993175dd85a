"""Micro-benchmarks, a module for each room: `figures(...)` yields Figures, for `kvtier bench` and for bench/ alike."""
