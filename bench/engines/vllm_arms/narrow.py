"""A model whose KV is that of SmolLM2-135M, 23 KB a token in bfloat16, and which computes about a tenth as much: for
machines on which bfloat16 is slow. Its weights are vLLM's dummies, the same in every engine; what it answers says
nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["REVISION", "options"]

REVISION = "dummy"  # what its weights are, for those that ask
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def options(model: str | None, folder: Path) -> dict[str, Any]:
    """What vLLM is to be told of ``model``; the narrow one is made below ``folder``."""
    if model != "narrow":
        return {"model": model}
    made = folder / "narrow"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(CONFIG, indent=1))
    return {"model": str(made), "load_format": "dummy", "skip_tokenizer_init": True}
