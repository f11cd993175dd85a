"""What of vLLM this connector serves, and under which name: everything else is refused at start, by one clear line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvtier.config import ConfigError
from kvtier.namespace import Namespace, Value, model_revision

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtier.connectors.vllm.metadata import Introduction
    from kvtier.connectors.vllm.settings import Settings

__all__ = ["TESTED", "check", "check_interface", "engine_folder", "hash_algorithm", "name"]

TESTED = ("0.32.0",)
"""Versions of vLLM that `make test-vllm` has run with."""

CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def check_interface(ours: type, theirs: type) -> None:
    """Raises ConfigError where vLLM's base class does not make the calls that ours answers, or makes them otherwise."""
    changed = []
    for call, answer in vars(ours).items():
        if call.startswith("_"):
            continue
        asked = inspect.getattr_static(theirs, call, None)
        if asked is None:
            changed.append(f"{call}: not in {theirs.__name__}")
        elif not isinstance(answer, property):
            wanted, found = _parameters(answer), _parameters(asked)
            if wanted != found:
                changed.append(f"{call}: ({', '.join(found)}) in {theirs.__name__}; expected ({', '.join(wanted)})")
    if changed:
        raise ConfigError(
            "\n".join([f"vLLM {vllm.__version__} is not served: what it asks of a connector has changed", *changed])
        )


def _parameters(method: Any) -> list[str]:
    return list(inspect.signature(getattr(method, "__func__", method)).parameters)


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> list[str]:
    """Raises ConfigError for what would give wrong answers or none; returns what should be logged."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    wrong = [
        f"{field}: {getattr(parallel, field)}: expected 1"
        for field in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
        if getattr(parallel, field, 1) > 1
    ]
    if not cache.enable_prefix_caching:
        wrong.append("enable_prefix_caching: False: expected True, since blocks are named by vLLM's prefix hashes")
    if hash_algorithm(vllm_config) not in CRYPTOGRAPHIC:
        wrong.append(
            f"prefix_caching_hash_algo: {hash_algorithm(vllm_config)!r}: expected {' or '.join(CRYPTOGRAPHIC)}; others "
            "can collide, and are not the same in every process"
        )
    wrong += _check_device(vllm_config, settings)
    if (policy := getattr(vllm_config.scheduler_config, "policy", "fcfs")) != "fcfs":
        wrong.append(
            f"scheduling_policy: {policy!r}: expected 'fcfs'; a request that this one preempts in the step in which it "
            "was scheduled leaves blocks in vLLM's prefix cache that nobody has computed, and they would be stored"
        )
    if settings.load_mode == "sync" and vllm_config.scheduler_config.async_scheduling:
        wrong.append("load_mode: 'sync': expected 'auto' or 'async' with async_scheduling")
    wrong += _check_groups(kv_cache_config)
    if getattr(cache, "calculate_kv_scales", False):
        wrong.append("calculate_kv_scales: True: expected False, since pages say nothing of scales found at run time")
    if settings.cache.disk.path is not None and not settings.weights_revision:
        wrong += _check_revision(vllm_config)
    if wrong:
        raise ConfigError("\n".join(wrong))
    notes = []
    if vllm_config.device_config.device_type != "cpu":
        notes.append("no run on a GPU has proven its bytes yet: compare answers before you rely on them")
    if vllm.__version__ not in TESTED:
        notes.append(f"vLLM {vllm.__version__} is not a version this was tested with ({', '.join(TESTED)})")
    return notes


def _check_device(vllm_config: VllmConfig, settings: Settings) -> list[str]:
    kind = vllm_config.device_config.device_type
    if kind == "cpu":
        return []
    if kind != "cuda" or torch.version.hip is not None:
        return [f"device: {kind if kind != 'cuda' else 'ROCm'!r}: expected 'cpu' or an NVIDIA GPU"]
    wrong = []
    if not settings.unverified_gpu:
        wrong.append("device: 'cuda': no run on a GPU has proven kvtier's bytes yet; unverified_gpu: true has it try")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        wrong.append("enable_sleep_mode: True: expected False on a GPU, whose memory it takes from under the copies")
    return wrong


def _check_revision(vllm_config: VllmConfig) -> list[str]:
    """Pages on disk outlive the process: what the model is has to be known without it."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return ["load_format: 'dummy' with disk.path: nothing says what the weights are; give weights_revision"]
    if callable(model.hf_overrides):
        return ["hf_overrides: a function with disk.path: nothing says what it changes; give weights_revision"]
    if not model.revision and not Path(model.model).is_dir():
        return ["disk.path: the weights' revision is not known; give weights_revision"]
    return []


def _check_groups(kv_cache_config: KVCacheConfig) -> list[str]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return [f"kv_cache_groups: {len(groups)}: expected 1; start with --disable-hybrid-kv-cache-manager"]
    spec = groups[0].kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)  # layers of one type and different sizes
    if inner is not None or type(spec) not in (FullAttentionSpec, MLAAttentionSpec):  # others derive from these
        return [f"attention: {type(spec).__name__}: expected full attention with K and V of one size in all layers"]
    if spec.tokens_per_state != 1:
        return [f"tokens_per_state: {spec.tokens_per_state}: expected 1, since a block's tokens lie in its own rows"]
    hashed = kv_cache_config.hash_block_size
    if hashed is not None and hashed != spec.block_size:
        return [f"hash_block_size: {hashed}: expected the block size, {spec.block_size}"]
    return []


def engine_folder(disk: Path, vllm_config: VllmConfig) -> Path:
    """Where an engine keeps its journal and its ranks' stores: in a data-parallel group each has a place of its own."""
    parallel = vllm_config.parallel_config
    return disk / (f"engine-{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else "engine")


def hash_algorithm(vllm_config: VllmConfig) -> str:
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _revision(vllm_config: VllmConfig, settings: Settings) -> str:
    """What the weights are. It has to outlive the process only where pages do: on disk."""
    if settings.weights_revision:
        return settings.weights_revision
    if settings.cache.disk.path is None:
        return "of this process"
    model = vllm_config.model_config
    return model_revision(model.model) if Path(model.model).is_dir() else str(model.revision)


def name(vllm_config: VllmConfig, settings: Settings, worker: Introduction) -> Namespace:
    """All that KV depends on beside the tokens, resolved. Takes seconds per 10 GB of weights in a local folder when
    there is a disk tier and no ``weights_revision``."""
    model, hf = vllm_config.model_config, vllm_config.model_config.hf_text_config
    rope: dict[str, Value] = {"max_model_len": model.max_model_len}
    for field in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        rope[field] = _plain(getattr(hf, field, None))
    parallel = vllm_config.parallel_config
    return Namespace(
        model=str(model.model),
        revision=_revision(vllm_config, settings),
        dtype=worker.geometry.dtype,
        rope=rope,
        layout=worker.geometry.layout_tag,
        attention=worker.attention,
        block_size=worker.geometry.block_size,
        quantization=str(model.quantization) if model.quantization else None,
        extra={
            "weights_dtype": str(model.dtype),
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "hash": hash_algorithm(vllm_config),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "vllm": vllm.__version__,
            "architectures": _plain(getattr(hf, "architectures", None)),
            "overrides": _plain(dict(model.hf_overrides)) if isinstance(model.hf_overrides, dict) else "a function",
        }
        | _drafter(vllm_config),
    )


def _drafter(vllm_config: VllmConfig) -> dict[str, Value]:
    """The model of its own that guesses, if there is one: its layers' KV lies in the same pages."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return {}
    return {"drafter": [str(draft.model), str(draft.revision)]}


def _plain(value: Any) -> Value:
    """A configuration's value as a namespace can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, bytes)) else str(value)
