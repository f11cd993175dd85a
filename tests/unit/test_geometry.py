"""KVGeometry: models' KV shapes, and arrays that are accepted or refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.geometry import LAYOUTS, KVGeometry, Segment

LLAMA_3_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
BYTES_PER_TOKEN = {
    "llama-3-8b": 131_072,
    "llama-3-70b": 327_680,
    "qwen3-8b": 147_456,
    "qwen3-32b": 262_144,
    "smollm2-135m": 23_040,
    "deepseek-v3": 70_272,
}


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_named_models_have_their_published_bytes_per_token(name: str) -> None:
    geometry = KVGeometry.named(name, block_size=16)
    assert geometry.bytes_per_token == BYTES_PER_TOKEN[name]
    assert geometry.payload_bytes == geometry.page_payload_bytes(16) == 16 * BYTES_PER_TOKEN[name]
    assert geometry.page_payload_bytes(64) == 64 * BYTES_PER_TOKEN[name]
    assert geometry.page_bytes % 4096 == 0
    assert 0 <= geometry.page_bytes - geometry.payload_bytes < 4096


def test_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'lama-3-8' is not known; did you mean 'llama-3-8b'\? Known are llama-3-8b, "
    ):
        KVGeometry.named("lama-3-8", block_size=16)
    assert KVGeometry.named("Llama-3-8B", block_size=16).layers == 32


def from_config(config: object, **options: Any) -> KVGeometry:
    return KVGeometry.from_config(config, **({"block_size": 16} | options))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA_3_8B, (32, 8, 128)),
        (LLAMA_3_8B | {"head_dim": 64}, (32, 8, 64)),  # said, not derived
        (LLAMA_3_8B | {"num_key_value_heads": None}, (32, 32, 128)),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}, (12, 12, 64)),
        (
            {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544,
             "multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 71, "torch_dtype": "bfloat16"},
            (32, 1, 64),
        ),
        (
            {"num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192, "multi_query": True,
             "new_decoder_architecture": True, "num_kv_heads": 8, "torch_dtype": "bfloat16"},
            (60, 8, 64),
        ),
        (
            {"n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {"kv_n_heads": 8},
             "torch_dtype": "float16"},
            (32, 8, 128),
        ),
        ({"text_config": LLAMA_3_8B, "vision_config": {}, "model_type": "llava"}, (32, 8, 128)),
        ({"text_config": LLAMA_3_8B | {"torch_dtype": None}, "dtype": "float16"}, (32, 8, 128)),
    ],
)  # fmt: skip
def test_config_gives_layers_heads_and_head_size(config: dict[str, Any], shape: tuple[int, int, int]) -> None:
    geometry = from_config(config)
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == shape
    assert not geometry.latent


def test_latent_attention_keeps_one_vector_per_token() -> None:
    geometry = from_config(DEEPSEEK_V3)
    assert geometry.latent
    assert geometry.bytes_per_token == 70_272
    assert geometry == KVGeometry.named("deepseek-v3", block_size=16)


def test_config_comes_as_mapping_object_file_or_folder(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return LLAMA_3_8B

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    want = from_config(LLAMA_3_8B)
    for config in (Config(), tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert from_config(config) == want
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config: '.*config\.json' cannot be read"):
        from_config(tmp_path)
    with pytest.raises(ValueError, match=r"config: '.*none' cannot be read"):
        from_config(tmp_path / "none")
    with pytest.raises(ValueError, match="config: int; expected a mapping"):
        from_config(3)


@pytest.mark.parametrize("unresolved", ["auto", None, "", "default"])
def test_unresolved_dtype_is_refused_unless_overridden(unresolved: object) -> None:
    config = LLAMA_3_8B | {"torch_dtype": unresolved}
    with pytest.raises(ValueError, match=r"geometry\.dtype: .*; expected what KV is really kept in, one of .*bfloat16"):
        from_config(config)
    assert from_config(config, dtype="float16").dtype == "float16"
    with pytest.raises(ValueError, match=r"geometry\.dtype: 'auto' is not resolved"):
        from_config(LLAMA_3_8B, dtype="auto")


def test_dtype_has_one_name() -> None:
    names = {from_config(LLAMA_3_8B, dtype=name).dtype for name in ("bf16", "bfloat16", "torch.bfloat16", "BFloat16")}
    assert names == {"bfloat16"}
    assert from_config(LLAMA_3_8B, dtype="fp8").bytes_per_token == 65_536
    assert from_config(LLAMA_3_8B | {"dtype": "float32"}).dtype == "float32"  # the newer field wins
    with pytest.raises(ValueError, match=r"geometry\.dtype: 'int4'"):
        from_config(LLAMA_3_8B, dtype="int4")


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"] * 16},
        {"layer_types": ["linear_attention", "full_attention"] * 16},
        {"attention_chunk_size": 8192},
        {"model_type": "mamba2"},
        {"model_type": "jamba"},
        {"layers_block_type": ["mamba", "attention"]},
        {"hybrid_override_pattern": "M*M"},
        {"full_attention_interval": 4},
        {"index_topk": 2048},
        {"is_encoder_decoder": True},
        {"cross_attention_layers": [3]},
        {"num_kv_shared_layers": 10},
    ],
)
def test_other_than_full_attention_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"config\.\w+: .*; groups other than full attention are not supported yet"):
        from_config(LLAMA_3_8B | extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 8192},  # as long as the longest context
        {"layer_types": ["full_attention"] * 32, "sliding_window": 4096},
    ],
)
def test_unused_window_is_full_attention(extra: dict[str, Any]) -> None:
    assert from_config(LLAMA_3_8B | extra) == from_config(LLAMA_3_8B)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": None}, "says nothing of its layers; expected one of num_hidden_layers"),
        ({"num_attention_heads": None}, "says nothing of its attention heads"),
        ({"hidden_size": None}, "says nothing of its hidden size"),
        ({"hidden_size": 4095}, "hidden size 4095 is not a multiple of 32 heads; expected a head_dim field"),
        ({"num_key_value_heads": [8, 4]}, r"config\.num_key_value_heads: \[8, 4\]; expected one whole number"),
        ({"num_hidden_layers": 0}, r"config\.num_hidden_layers: 0"),
        ({"num_hidden_layers": True}, r"config\.num_hidden_layers: True"),
        ({"v_head_dim": 64}, r"config\.v_head_dim: 64; expected 128"),
    ],
)
def test_config_faults_name_their_field(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_config(LLAMA_3_8B | change)


GEOMETRY = KVGeometry(layers=2, kv_heads=4, head_dim=32, dtype="float16", block_size=16, layout="split.bnhd")


def test_every_field_is_in_the_fingerprint() -> None:
    changes: list[dict[str, Any]] = [
        {"layers": 3}, {"kv_heads": 8}, {"head_dim": 16}, {"dtype": "bfloat16"}, {"block_size": 32},
        {"layout": "split.bhnd"}, {"kv_heads": 32, "head_dim": 4},
        {"latent": True, "kv_heads": 1, "layout": ""},
    ]  # fmt: skip
    assert {key for change in changes for key in change} == {f.name for f in dataclasses.fields(KVGeometry)}
    prints = {GEOMETRY.fingerprint} | {GEOMETRY.with_(**change).fingerprint for change in changes}
    assert len(prints) == len(changes) + 1
    assert {len(p) for p in prints} == {32}
    tags = {GEOMETRY.layout_tag} | {GEOMETRY.with_(**change).layout_tag for change in changes}
    assert len(tags) == len(changes) + 1


def test_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from kvtier.geometry import KVGeometry; print(KVGeometry.named('qwen3-8b', block_size=16).fingerprint.hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == KVGeometry.named("qwen3-8b", block_size=16).fingerprint.hex() == FINGERPRINT


# In the header of every store: a change makes stores unreadable and needs a new version in the encoding.
FINGERPRINT = "e62d5e221054815c83eea3e18bf9160fc580bbedf2bc0e283bee89e8b51b5986"


def test_geometry_imports_no_torch() -> None:
    code = "import sys, kvtier.geometry, kvtier.tiers.device, kvtier.tiers.host; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": 0}, r"geometry\.layers: 0; expected a whole number above zero"),
        ({"block_size": 1.5}, r"geometry\.block_size: 1\.5"),
        ({"head_dim": True}, r"geometry\.head_dim: True"),
        ({"dtype": "auto"}, r"geometry\.dtype: 'auto' is not resolved"),
        ({"layout": "bnhd"}, r"geometry\.layout: 'bnhd'; expected for a model with K and V one of stacked\.b2hnd"),
        ({"layout": "mla.bnc"}, "expected for a model with K and V"),
        (
            {"latent": True, "kv_heads": 1},
            r"geometry\.layout: 'split\.bnhd'; expected for an MLA model one of mla\.bnc",
        ),
        ({"latent": True, "layout": ""}, r"geometry\.kv_heads: 4; expected 1 for MLA"),
    ],
)
def test_geometry_faults_name_their_field(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GEOMETRY.with_(**change)


def test_ranks_divide_heads_or_copy_them() -> None:
    llama = KVGeometry.named("llama-3-8b", block_size=16)
    assert [llama.sharded(n).kv_heads for n in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert KVGeometry.named("deepseek-v3", block_size=16).sharded(8).bytes_per_token == 70_272
    for world in (3, 12, 0):
        with pytest.raises(ValueError, match=f"world_size: {world}; expected a divisor or a multiple of 8 KV heads"):
            llama.sharded(world)


def arrays(tag: str, blocks: int = 5) -> tuple[KVGeometry, list[Any]]:
    geometry = GEOMETRY.with_(layout=tag)
    return geometry, geometry.allocate(blocks)


def test_segments_follow_strides_not_shapes() -> None:
    # K and V as views of one stacked buffer: each block's two halves are neighbours and become one run.
    stacked = np.zeros((5, 2, 16, 4, 32), np.float16)
    views = [(stacked[:, 0], stacked[:, 1]), *[(np.zeros((5, 16, 4, 32), np.float16),) * 1 for _ in range(2)]]
    adopted = GEOMETRY.adopt([views[0], (views[1][0], views[2][0])])
    half = 16 * 4 * 32 * 2
    assert adopted.slots == 5
    assert adopted.segments[0] == Segment(stacked.ctypes.data, 2 * half, 2 * half)
    assert [s.length for s in adopted.segments] == [2 * half, half, half]


def test_mapping_keys_name_arrays_in_messages() -> None:
    geometry, tensors = arrays("vllm.lbhnc")
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    assert geometry.adopt(dict(zip(names, tensors, strict=True))).slots == 5
    with pytest.raises(ValueError, match=r"tensors\['model\.layers\.1\.attn'\] of shape \[4, 4, 16, 64\]"):
        geometry.adopt({names[0]: tensors[0], names[1]: tensors[1][:4]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_torch_tensors_are_adopted_through_dlpack(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    geometry = GEOMETRY.with_(layout="stacked.2bnhd", dtype=dtype)
    tensors = [torch.zeros(geometry.array_shape(3), dtype=getattr(torch, dtype)) for _ in range(2)]
    adopted = geometry.adopt(tensors)
    assert adopted.slots == 3
    assert [s.base for s in adopted.segments[::2]] == [t.data_ptr() for t in tensors]
    assert sum(s.length for s in adopted.segments) == geometry.payload_bytes
    with pytest.raises(ValueError, match=r"tensors\[0\] .*holds b?float\w+; expected float64"):
        geometry.with_(dtype="float64").adopt(tensors)


def test_torch_tensors_that_cannot_be_shared_say_why() -> None:
    torch = pytest.importorskip("torch")
    shape = GEOMETRY.array_shape(3)
    with pytest.raises(ValueError, match=r"tensors\[0\] of shape \[3, 16, 4, 32\]: "):
        GEOMETRY.adopt([torch.zeros(shape, dtype=torch.float16, device="meta")] * 4)


def test_raw_bits_stand_for_any_dtype_of_their_size() -> None:
    shape = GEOMETRY.array_shape(3)
    for dtype in ("u2", "i2", "V2"):
        assert GEOMETRY.with_(dtype="bfloat16").adopt([np.zeros(shape, dtype) for _ in range(4)]).slots == 3
    with pytest.raises(ValueError, match=r"holds float16; expected bfloat16"):
        GEOMETRY.with_(dtype="bfloat16").adopt([np.zeros(shape, "f2") for _ in range(4)])


class OnGpu:
    shape = (3, 16, 4, 32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (10, 0)  # ROCm


class OldOnGpu:
    shape = (3, 16, 4, 32)
    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012


def fresh(blocks: int = 3, **change: Any) -> list[np.ndarray]:
    return GEOMETRY.with_(**change).allocate(blocks)


def read_only(tensors: list[np.ndarray]) -> list[np.ndarray]:
    tensors[2].flags.writeable = False
    return tensors


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: fresh()[:3], r"tensors: got 3 arrays; expected 4 for 2 layers of split\.bnhd"),
        (lambda: [*fresh()[:3], np.zeros((4, 16, 4, 32), "f2")], r"tensors\[3\] of shape \[4, .*expected 3 blocks"),
        (lambda: fresh(layout="split.bhnd"), r"tensors\[0\] of shape \[3, 4, 16, 32\]: expected \[blocks, 16, 4, 32\]"),
        (lambda: [t[..., None] for t in fresh()], r"of shape \[3, 16, 4, 32, 1\]: expected \[blocks, 16, 4, 32\]"),
        (lambda: [t.swapaxes(1, 2) for t in fresh(layout="split.bhnd")], "lies in memory as bhnd.*expected bnhd"),
        (lambda: [t[::-1] for t in fresh()], "expected none to be zero or negative"),
        (lambda: [np.broadcast_to(t[:1], t.shape) for t in fresh()], "read-only|zero or negative"),
        (lambda: fresh(dtype="float32"), r"tensors\[0\] .*holds float32; expected float16"),
        (lambda: [t.astype(">f2") for t in fresh()], "big-endian"),
        (lambda: [t.astype("c8") for t in fresh()], "holds <c8; expected float16"),
        (lambda: read_only(fresh()), r"tensors\[2\] .*is read-only"),
        (lambda: [t[:0] for t in fresh()], "holds no block"),
        (lambda: [fresh()[0]] * 4, r"tensors\[0\] and tensors\[1\] share memory"),
        (lambda: [np.zeros((3, 16, 4, 64), "f2")[..., :32] for _ in range(4)], r"runs of only 64 bytes .*at least 512"),
        (lambda: [OnGpu()] * 4, r"tensors\[0\] of shape .*: is on DLPack device type 10; expected an array in host"),
        (lambda: [OldOnGpu()] * 4, "its array interface has no 'shape'"),
        (lambda: [[1.0]] * 4, r"tensors\[0\]\[0\]: float is not an array"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_refused_by_name(make: Callable[[], list[Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GEOMETRY.adopt(make())


def test_overlapping_blocks_are_refused() -> None:
    # Blocks that start half a block apart, and an array that is a shifted view of another.
    base = np.zeros(64 * 1024, np.float16)
    half = np.lib.stride_tricks.as_strided(base, (3, 16, 4, 32), (2048, 256, 64, 2))
    with pytest.raises(ValueError, match=r"tensors\[0\].*(share memory|shares memory)"):
        GEOMETRY.adopt([half, *fresh()[1:]])
    shifted = [base[k * 1000 :][: 3 * 2048].reshape(3, 16, 4, 32) for k in range(4)]
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] share memory"):
        GEOMETRY.adopt(shifted)


@pytest.mark.parametrize("tag", [tag for tag in LAYOUTS if not LAYOUTS[tag].latent])
@pytest.mark.parametrize("claimed", [tag for tag in LAYOUTS if not LAYOUTS[tag].latent])
def test_a_layout_is_never_taken_for_another(tag: str, claimed: str) -> None:
    # As many heads as tokens, so that shapes cannot tell the two apart; memory order still does where it differs.
    geometry = GEOMETRY.with_(kv_heads=16, block_size=16, layout=tag)
    tensors = geometry.allocate(5)
    alike = tag == claimed or sorted([tag, claimed]) in (
        ["stacked.b2hnd", "stacked.b2nhd"],
        ["stacked.2bhnd", "stacked.2bnhd"],
        ["split.bhnd", "split.bnhd"],
    )
    if alike:
        return  # equal sizes and equal order of strides: only the name tells them apart, which is why it must be given
    with pytest.raises(ValueError, match="tensors"):
        geometry.with_(layout=claimed).adopt(tensors)


def test_one_block_and_one_head_are_accepted() -> None:
    geometry = GEOMETRY.with_(kv_heads=1, layout="vllm.blhnc")
    for blocks in (1, 2):
        adopted = geometry.adopt(geometry.allocate(blocks))
        assert adopted.slots == blocks
        assert [s.length for s in adopted.segments] == [geometry.payload_bytes]


def test_layers_inside_a_block_must_be_in_order_and_side_by_side() -> None:
    geometry, tensors = arrays("vllm.blhnc")
    with pytest.raises(ValueError, match=r"expected for vllm\.blhnc all 2 layers of a block side by side"):
        geometry.adopt(tensors[::-1])
    with pytest.raises(ValueError, match="side by side"):
        geometry.adopt(GEOMETRY.with_(layout="vllm.lbhnc").allocate(5))
    with pytest.raises(ValueError, match=r"has its blocks 16384 bytes apart; expected 8192 for layout vllm\.lbhnc"):
        GEOMETRY.with_(layout="vllm.lbhnc").adopt(tensors)
