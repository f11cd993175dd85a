"""KV shapes of models: read from Hugging Face configurations, or known by name.

A model that is not full attention in all layers is refused: its prefix cannot be restored by blocks of KV alone, and
guessing would serve wrong answers.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.arguments import words

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}

# The same thing under the names that model families gave it.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")

# Fields whose presence (not None, 0, False or empty) says that some layers keep something else than full-attention KV.
_OTHER_STATE = (
    *("layers_block_type", "block_types", "hybrid_override_pattern", "attn_layer_indices", "attn_layer_period"),
    *("full_attention_interval", "attention_chunk_size", "state_size", "ssm_cfg", "mamba_d_state", "ssm_state_size"),
    *(
        "conv_L_cache",
        "cross_attention_layers",
        "num_kv_shared_layers",
        "index_topk",
        "use_cla",
        "global_attn_every_n_layers",
    ),
)
_RECURRENT = ("mamba", "rwkv", "jamba", "zamba", "recurrent_gemma", "bamba", "falcon_h1", "lfm2", "retnet", "xlstm")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV shape, all ranks together."""

    layers: int
    kv_heads: int
    head_dim: int
    latent: bool = False
    dtype: str | None = None  # as the configuration says it; None: it does not


KNOWN = {
    "llama-3-8b": Shape(32, 8, 128),
    "llama-3-70b": Shape(80, 8, 128),
    "qwen3-8b": Shape(36, 8, 128),
    "qwen3-32b": Shape(64, 8, 128),
    "smollm2-135m": Shape(30, 3, 64),
    "deepseek-v3": Shape(61, 1, 512 + 64, latent=True),
}


def known(name: str) -> Shape:
    """The shape of a model known by name. ValueError gives the nearest and all known names otherwise."""
    shape = KNOWN.get(words("model", name).lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), KNOWN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"model {name!r} is not known; {hint}Known are {', '.join(KNOWN)}")
    return shape


def resolved_dtype(value: object) -> str:
    """The dtype's one name. ValueError for what is not resolved ("auto", None) or not a KV dtype."""
    name = str(value).removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    if name not in ITEM_BYTES:
        hint = " is not resolved" if value is None or name in ("auto", "default", "") else ""
        raise ValueError(
            f"geometry.dtype: {value!r}{hint}; expected what KV is really kept in, one of {', '.join(ITEM_BYTES)}"
        )
    return name


def read_config(config: Mapping[str, Any] | str | Path | Any) -> Shape:
    """The shape that a Hugging Face configuration describes; see KVGeometry.from_config."""
    fields = _fields(config)
    outer = fields
    if _first(fields, _LAYERS) is None and isinstance(fields.get("text_config"), Mapping):
        fields = fields["text_config"]  # models with other inputs keep the language model's part there
    _refuse_other_attention(fields)
    layers = _count(fields, "layers", _LAYERS)
    dtype = next((c[k] for c in (fields, outer) for k in ("dtype", "torch_dtype") if c.get(k) is not None), None)
    text = None if dtype is None else str(dtype)
    if fields.get("kv_lora_rank"):
        rank = _count(fields, "latent size", ("kv_lora_rank",))
        return Shape(layers, 1, rank + _count(fields, "rotary size", ("qk_rope_head_dim",)), latent=True, dtype=text)
    heads = _count(fields, "attention heads", _HEADS)
    kv_heads = _kv_heads(fields, heads)
    if _first(fields, _HEAD_DIM) is not None:
        head_dim = _count(fields, "head size", _HEAD_DIM)
    else:
        hidden = _count(fields, "hidden size", _HIDDEN)
        if hidden % heads:
            raise ValueError(
                f"config: hidden size {hidden} is not a multiple of {heads} heads; expected a head_dim field"
            )
        head_dim = hidden // heads
    value_dim = fields.get("v_head_dim")
    if value_dim not in (None, head_dim):
        raise ValueError(f"config.v_head_dim: {value_dim!r}; expected {head_dim}: K and V heads of one size")
    return Shape(layers, kv_heads, head_dim, dtype=text)


def _fields(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"config: {str(path)!r} cannot be read ({error}); expected a model's config.json"
            ) from None
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(f"config: {type(config).__name__}; expected a mapping, an object with to_dict, or a path")
    return config


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _count(fields: Mapping[str, Any], what: str, names: tuple[str, ...]) -> int:
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        raise ValueError(f"config: says nothing of its {what}; expected one of {', '.join(names)}")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.{name}: {value!r}; expected one whole number above zero for all layers")
    return value


def _kv_heads(fields: Mapping[str, Any], heads: int) -> int:
    # Falcon's first models and GPT-BigCode say only that there is one KV head; later ones count them.
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    attention = fields.get("attn_config")  # MPT's
    if isinstance(attention, Mapping) and attention.get("kv_n_heads"):
        return _count(attention, "KV heads", ("kv_n_heads",))
    if _first(fields, _KV_HEADS) is None:
        return heads  # multi-head attention
    return _count(fields, "KV heads", _KV_HEADS)


def _refuse_other_attention(fields: Mapping[str, Any]) -> None:
    def refuse(name: str, value: object) -> None:
        raise ValueError(
            f"config.{name}: {value!r}; groups other than full attention are not supported yet, "
            "expected full attention in all layers"
        )

    kind = str(fields.get("model_type", ""))
    if kind.startswith(_RECURRENT):
        refuse("model_type", kind)
    if fields.get("is_encoder_decoder"):
        refuse("is_encoder_decoder", True)
    for name in _OTHER_STATE:
        if fields.get(name):
            refuse(name, fields[name])
    types = fields.get("layer_types")
    if types:
        other = sorted({str(kind) for kind in types} - {"full_attention"})
        if other:
            refuse("layer_types", other)
        return  # every layer is named: a window that is set is not in use
    window = fields.get("sliding_window")
    reach = fields.get("max_position_embeddings")
    covers_all = isinstance(window, int) and isinstance(reach, int) and window >= reach
    if window and fields.get("use_sliding_window") is not False and not covers_all:
        refuse("sliding_window", window)
