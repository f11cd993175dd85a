"""No field of a namespace can imitate another, and every process computes the same digests."""

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.content import Content
from kvtier.namespace import Namespace, adapter_digest, chain_digests, encode, model_revision, root_digest

BASE: dict[str, Any] = {
    "model": "meta-llama/Meta-Llama-3-8B",
    "revision": "62bd457b6fe961a42a631306577e622c83876cb6",
    "dtype": "bfloat16",
    "rope": {"rope_theta": 500000.0, "max_position_embeddings": 8192},
    "layout": "page-first/kv/32x8x128",
    "attention": "sdpa/avx512",
    "block_size": 16,
}
FULL: dict[str, Any] = BASE | {
    "quantization": "fp8",
    "adapter": bytes(range(32)),
    "salt": "tenant-7",
    "extra": {"sliding_window": None, "layers": [0, 1]},
}
GOLDEN_BASE = "6a24443c0d1ef29a502ca34efedbea95915a6e2b5e52a6ece59e04df2ff7bdec"
GOLDEN_FULL = "bffc5493d28bc003abd6e1d1e65be11d78bb13d55947a3bf6f1a1a0f8c8150b9"
GOLDEN_CHAIN = "eceaa9fc2e97e22adcf482e5d8885a8fbb46e786b9f281e36c24040c62f03ebf"
GOLDEN_MEDIA_CHAIN = "bb233a5a525fa17ae7c4c897706ee2f528ed9a1ea26548a3fc45a650a24dd5c1"


def test_fingerprint_has_not_changed_since_it_was_first_stored() -> None:
    # Changing one of these makes every stored page unreachable: raise the version in the encoding on purpose instead.
    assert Namespace(**BASE).fingerprint.hex() == GOLDEN_BASE
    assert Namespace(**FULL).fingerprint.hex() == GOLDEN_FULL


def test_encoding_is_the_documented_one() -> None:
    assert encode("ab") == b"s" + struct.pack("<Q", 2) + b"ab"
    inner = encode("k") + encode([1, None])
    assert encode({"k": [1, None]}) == b"m" + struct.pack("<Q", len(inner)) + inner


def test_fingerprint_is_equal_in_every_process_whatever_the_hash_seed() -> None:
    code = f"from kvtier.namespace import Namespace; print(Namespace(**{FULL!r}).fingerprint.hex())"
    seen = set()
    for seed in ("0", "1", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        seen.add(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)
    assert seen == {GOLDEN_FULL.encode() + b"\n"}


CHANGES: dict[str, list[Any]] = {
    "model": ["meta-llama/Meta-Llama-3-8B ", "meta-llama/Meta-Llama-3-8b"],
    "revision": ["62bd457b6fe961a42a631306577e622c83876cb7"],
    "dtype": ["float16"],
    "rope": [
        {"rope_theta": 500000, "max_position_embeddings": 8192},
        {"rope_theta": 500000.0, "max_position_embeddings": 8192, "scaling": None},
        {"rope_theta": 500000.0},
        {},
    ],
    "layout": ["page-first/kv/32x8x64"],
    "attention": ["sdpa/avx2"],
    "block_size": [32],
    "quantization": ["none", None, "0"],
    "adapter": [None, bytes(32)],
    "salt": [None, "", "0", "tenant-70", "tenant-"],
    "extra": [{}, {"sliding_window": 0, "layers": [0, 1]}, {"sliding_window": None, "layers": [1, 0]}],
}


def test_any_change_of_any_field_changes_the_fingerprint() -> None:
    assert set(CHANGES) == {item.name for item in fields(Namespace)}
    seen = {Namespace(**FULL).fingerprint}
    for name, values in CHANGES.items():
        for value in values:
            seen.add(Namespace(**FULL | {name: value}).fingerprint)
    assert len(seen) == 1 + sum(map(len, CHANGES.values()))


_TEXT = ("model", "revision", "layout", "attention", "quantization", "salt")


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12), st.integers(1, 11), st.data())
def test_bytes_moved_between_neighbours_change_the_fingerprint(left: str, right: str, cut: int, data: Any) -> None:
    first = data.draw(st.integers(0, len(_TEXT) - 2))
    names, whole = _TEXT[first : first + 2], "x" + left + right + "y"
    one = BASE | dict(zip(names, ("x" + left, right + "y"), strict=True))
    two = BASE | dict(zip(names, (whole[:cut], whole[cut:]), strict=True))
    if one != two and whole[:cut].strip() and whole[cut:].strip():
        try:
            spaces = Namespace(**one), Namespace(**two)
        except ValueError:  # a drawn word that a namespace refuses, such as "auto"
            return
        assert spaces[0].fingerprint != spaces[1].fingerprint


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, -1.5]) | st.sampled_from(["", "0", "n"])
    | st.sampled_from([b"", b"0", b"n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "b"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _typed(value: Any) -> Any:
    """A form in which Python compares what an encoding has to tell apart."""
    if isinstance(value, dict):
        return ("map", tuple(sorted((key, _typed(item)) for key, item in value.items())))
    if isinstance(value, list):
        return ("list", tuple(map(_typed, value)))
    return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_encoding_tells_all_unequal_values_apart(one: Any, two: Any) -> None:
    assert (encode(one) == encode(two)) == (repr(_typed(one)) == repr(_typed(two)))


def test_order_of_a_mapping_does_not_count() -> None:
    turned = dict(reversed(BASE["rope"].items()))
    assert Namespace(**BASE | {"rope": turned}) == Namespace(**BASE)


def test_later_change_of_the_callers_dictionary_changes_nothing() -> None:
    rope = dict(BASE["rope"])
    space = Namespace(**BASE | {"rope": rope})
    rope["rope_theta"] = 1.0
    assert space.with_(salt=None) == Namespace(**BASE)


def test_spelling_of_a_dtype_does_not_count() -> None:
    assert Namespace(**BASE | {"dtype": "torch.bfloat16"}) == Namespace(**BASE | {"dtype": "bf16"}) == Namespace(**BASE)


def test_with_changes_only_what_it_names() -> None:
    space = Namespace(**BASE)
    salted = space.with_(salt="a", adapter=bytes(32))
    assert salted != space
    assert salted.with_(salt=None, adapter=None) == space
    assert len({space, salted, Namespace(**BASE)}) == 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dtype", "auto", "resolved dtype, one of"),
        ("dtype", None, "resolved dtype, one of"),
        ("revision", "main", "commit hash"),
        ("revision", "", "not resolved"),
        ("model", "auto", "not resolved"),
        ("attention", None, "not resolved"),
        ("block_size", 0, "positive number"),
        ("block_size", True, "positive number"),
        ("adapter", "my-lora", "not a name"),
        ("adapter", b"short", "32-byte"),
        ("salt", 7, "string or None"),
        ("quantization", "auto", "not resolved"),
        ("rope", None, "mapping"),
        ("rope", {"x": float("nan")}, "cannot hold nan"),
        ("extra", {1: 2}, "string keys"),
        ("extra", {"x": object()}, "cannot hold object"),
    ],
)
def test_refuses_what_is_not_resolved(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Namespace(**BASE | {name: value})
    assert "\n" not in str(caught.value)


def test_chain_is_the_documented_sha256_chain() -> None:
    space = Namespace(**BASE).fingerprint
    tokens = list(range(40))  # two blocks of 16 and a partial one, which has no digest
    digest = hashlib.sha256(b"kvtier.root.v1" + space + struct.pack("<I", 3)).digest()
    assert root_digest(space, 3) == digest
    expected = []
    for at in (0, 16):
        digest = hashlib.sha256(digest + struct.pack("<16I", *tokens[at : at + 16]) + bytes(32)).digest()
        expected.append(digest)
    assert chain_digests(space, 3, tokens, 16) == expected
    assert chain_digests(space, 3, np.array(tokens, np.uint32), 16) == expected
    assert expected[-1].hex() == GOLDEN_CHAIN


def test_chain_over_media_is_the_documented_one() -> None:
    space, tokens, one, two = bytes(32), range(48), bytes(range(32)), bytes([7] * 32)
    media = [(40, 2, two), (10, 30, one)]  # [10, 40) touches all three blocks, [40, 42) the last one
    digest, expected = root_digest(space, 0), []
    for at, spans in ((0, [(10, 30, one)]), (16, [(-6, 30, one)]), (32, [(-22, 30, one), (8, 2, two)])):
        written = b"".join(struct.pack("<qQ32s", *span) for span in spans)
        label = struct.pack("<16I", *tokens[at : at + 16]) + hashlib.sha256(b"kvtier.media.v1" + written).digest()
        digest = hashlib.sha256(digest + label).digest()
        expected.append(digest)
    assert chain_digests(space, 0, tokens, 16, media) == expected
    assert expected[-1].hex() == GOLDEN_MEDIA_CHAIN


def test_chain_over_an_engines_own_hashes() -> None:
    space, hashes = bytes(32), np.arange(64, dtype=np.uint8).reshape(2, 32)
    first = hashlib.sha256(root_digest(space, 0) + hashes[0].tobytes()).digest()
    assert chain_digests(space, 0, hashes, 16) == [first, hashlib.sha256(first + hashes[1].tobytes()).digest()]


def test_chain_depends_on_everything_before_it() -> None:
    space = bytes(32)
    one, two = (chain_digests(space, 0, [first, *range(1, 32)], 16) for first in (0, 99))
    assert not set(one) & set(two)
    assert chain_digests(space, 1, range(32), 16)[0] != chain_digests(space, 0, range(32), 16)[0]
    assert chain_digests(space, 0, [], 16) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((b"short", 0, [1], 16), "expected a namespace's fingerprint"),
        ((bytes(32), -1, [1], 16), "group: -1"),
        ((bytes(32), 0, [-1], 1), "-1 is not a token id"),
        ((bytes(32), 0, [1 << 32], 1), "4294967296 is not a token id"),
        ((bytes(32), 0, [1.5], 1), "expected a flat sequence of integers"),
        ((bytes(32), 0, [1], 0), "block_size: 0"),
        ((bytes(32), 0, np.zeros((1, 16), np.uint8), 16), "16 bytes; expected 32"),
    ],
)
def test_chain_refuses_labels_it_cannot_digest(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chain_digests(*arguments)


def test_adapter_is_its_content_not_its_name(tmp_path: Path) -> None:
    for name, weights in (("one", b"w"), ("two", b"w"), ("other", b"v")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8}')
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
        (tmp_path / name / "README.md").write_text(name)
    one, two, other = (adapter_digest(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two != other
    (tmp_path / "two" / "adapter_config.json").write_text('{"r": 16}')
    assert adapter_digest(tmp_path / "two") != one
    with pytest.raises(ValueError, match="not a folder"):
        adapter_digest(tmp_path / "absent")


def test_adapter_tensors_count_by_name_type_shape_and_bytes() -> None:
    zeros = np.zeros((2, 4), np.float32)
    seen = {
        adapter_digest({"a": zeros}),
        adapter_digest({"b": zeros}),
        adapter_digest({"a": zeros.reshape(4, 2)}),
        adapter_digest({"a": zeros.view(np.int32)}),
        adapter_digest({"a": zeros + 1}),
    }
    assert len(seen) == 5
    assert adapter_digest({"a": zeros, "b": zeros}) == adapter_digest({"b": zeros, "a": zeros})


def test_model_revision_reads_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        model_revision(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    before = model_revision(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a" * 99 + b"b")
    assert before.startswith("sha256:")
    assert model_revision(tmp_path) != before
    assert Namespace(**BASE | {"revision": before}).revision == before


def test_the_catalog_computes_the_same_chain() -> None:
    from kvtier.catalog import Catalog, Tier, TierSpec

    space = Namespace(**FULL).fingerprint
    tokens = np.arange(64, dtype=np.uint32) * 40_503 % 128_000
    media = [(20, 30, bytes([7] * 32))]
    catalog = Catalog([TierSpec(Tier.HOST, 8)], block_size=16, labels="content")
    nodes = catalog.insert(catalog.root(space, 2), Content(tokens, media).whole(16), 1)
    identities = np.asarray(catalog.identities(nodes))
    assert [row[:32].tobytes() for row in identities] == chain_digests(space, 2, tokens, 16, media)
    assert identities[0, 32:64].tobytes() == root_digest(space, 2)
