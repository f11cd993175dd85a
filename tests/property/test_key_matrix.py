"""Whatever KV depends on is in its key: change one thing and nothing is found, in any tier, before and after a restart.

Every test first sees the full hit when nothing is changed, or an empty cache would pass for a strict one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier import CacheConfig
from kvtier.catalog import Tier
from kvtier.content import Content
from kvtier.geometry import KVGeometry
from kvtier.lookup import Lookup
from kvtier.manager import CacheManager
from kvtier.namespace import Namespace
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 4
GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_size=BLOCK)
IMAGE, OTHER_IMAGE = bytes(range(32)), bytes([*range(31), 0])
TOKENS = [1, 2, 3, 4, 5, *[9] * 10, 6, 7, 8, 10, 11, 12]  # ten placeholders of one image, five whole blocks and a token
MEDIA = [(5, 10, IMAGE)]
BLOCKS = len(TOKENS) // BLOCK
ADAPTER = bytes([3] * 32)
WHO: dict[str, Any] = {"salt": "tenant-1", "adapter": ADAPTER, "media": MEDIA}

# For each field of a namespace other values that KV could have been computed under, none like the base's.
BASE: dict[str, Any] = {
    "model": "model",
    "revision": "1",
    "dtype": "bfloat16",
    "rope": {"theta": 10000.0, "scaling": {"factor": 2.0}},
    "layout": GEOMETRY.layout_tag,
    "attention": "sdpa/avx512",
    "block_size": BLOCK,
    "quantization": "fp8",
    "adapter": None,
    "salt": None,
    "extra": {"window": 4},
}
CHANGES: dict[str, list[Any]] = {
    "model": ["model-2", "Model"],
    "revision": ["2", "01"],
    "dtype": ["float16"],
    "rope": [{"theta": 10000.0}, {"theta": 10000.0, "scaling": {"factor": 4.0}}, {}],
    "layout": [GEOMETRY.with_(layout="stacked.2bnhd").layout_tag],
    "attention": ["sdpa/avx2"],
    "block_size": [2 * BLOCK],
    "quantization": [None, "fp8 "],
    "adapter": [bytes(32), bytes([3] * 31 + [4])],
    "salt": ["", "tenant-2"],
    "extra": [{}, {"window": 8}, {"window": 4, "sink": None}],
}

# The same of a request. Of what follows an image, the base's blocks before it may be found and no more.
REQUESTS: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    "no salt": (0, TOKENS, WHO | {"salt": None}),
    "another salt": (0, TOKENS, WHO | {"salt": "tenant-2"}),
    "an empty salt": (0, TOKENS, WHO | {"salt": ""}),
    "no adapter": (0, TOKENS, WHO | {"adapter": None}),
    "another adapter": (0, TOKENS, WHO | {"adapter": bytes([3] * 31 + [4])}),
    "salt and adapter": (0, TOKENS, WHO | {"salt": ADAPTER.hex(), "adapter": None}),
    "no image": (1, TOKENS, WHO | {"media": []}),
    "another image": (1, TOKENS, WHO | {"media": [(5, 10, OTHER_IMAGE)]}),
    "the image a token later": (1, TOKENS, WHO | {"media": [(6, 10, IMAGE)]}),
    "the image a block later": (1, TOKENS, WHO | {"media": [(9, 10, IMAGE)]}),
    "a longer image": (1, TOKENS, WHO | {"media": [(5, 11, IMAGE)]}),
    "an image in two": (1, TOKENS, WHO | {"media": [(5, 5, IMAGE), (10, 5, IMAGE)]}),
    "a second image": (1, TOKENS, WHO | {"media": [*MEDIA, (5, 10, OTHER_IMAGE)]}),
    "an image behind": (3, TOKENS, WHO | {"media": [*MEDIA, (15, 1, OTHER_IMAGE)]}),
    "an image from the start": (0, TOKENS, WHO | {"media": [*MEDIA, (0, 1, IMAGE)]}),
} | {
    f"token {at}": (at // BLOCK, [*TOKENS[:at], token, *TOKENS[at + 1 :]], WHO)
    for at in range(BLOCKS * BLOCK)
    for token in (0, TOKENS[at] + (1 << 16))
}  # fmt: skip


def _manager(path: Path, **changes: Any) -> CacheManager:
    said = BASE | changes
    layout = said["layout"].partition("/")[0]
    geometry = GEOMETRY.with_(block_size=said["block_size"], dtype=said["dtype"], layout=layout)
    config = CacheConfig(
        block_size=geometry.block_size,
        host={"size": 64 * 4096, "write": "at_once"},
        disk={"path": str(path), "size": "2MiB", "write": "at_once"},
    )
    namespace = Namespace(**said | {"layout": geometry.layout_tag})
    return CacheManager(config, geometry, namespace, DevicePool.allocate(geometry, 16))


def _serve(manager: CacheManager, name: str, tokens: list[int], who: dict[str, Any]) -> int:
    """One request from start to end; returns how many of its tokens did not have to be computed."""
    manager.get_computed_blocks(name, tokens, **who)
    assert manager.allocate_slots(name, len(tokens)) is not None
    while not manager.ready(name):
        manager.poll(1.0)
    found = manager.num_computed_tokens(name)
    manager.cache_blocks(name, len(tokens))
    manager.free(name)
    assert manager.flush()
    return found


STATES: dict[str, tuple[Tier, ...]] = {"device": (), "host": (Tier.DEVICE,), "disk": (Tier.DEVICE, Tier.HOST)}


@pytest.fixture(params=[*STATES, "restart"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[CacheManager, str]]:
    """A cache that holds the base prompt in one tier, and that tier's name."""
    manager = _manager(tmp_path)
    _serve(manager, "base", TOKENS, WHO)
    state = "disk" if request.param == "restart" else request.param
    for tier in STATES[state]:
        assert len(manager.evict(tier, TOKENS, **WHO)) == BLOCKS
    if request.param == "restart":
        manager.close()
        manager = _manager(tmp_path)
    with manager:
        assert manager.locate(TOKENS, **WHO) == {state: BLOCKS * BLOCK}
        yield manager, state


def test_a_request_finds_what_is_its_own_to_the_last_bit_and_nothing_else(cache: tuple[CacheManager, str]) -> None:
    manager, state = cache
    for name, (blocks, tokens, who) in REQUESTS.items():
        want = {state: blocks * BLOCK} if blocks else {}
        assert manager.locate(tokens, **who) == want, name
        with manager.get_computed_blocks(name, tokens, **who) as found:
            assert found.tokens_by_tier == want, name
        for tier in Tier.DEVICE, Tier.HOST, Tier.DISK:
            assert blocks or not len(manager.evict(tier, tokens, **who)), name
    with manager.get_computed_blocks("again", TOKENS, **WHO) as found:
        assert found.tokens_by_tier == {state: BLOCKS * BLOCK}


def test_another_namespace_finds_nothing(cache: tuple[CacheManager, str]) -> None:
    manager, state = cache
    for changes in _namespaces():
        if "block_size" in changes:  # labels of another length: nothing could be asked
            continue
        lookup = Lookup(manager.catalog, manager.plane, Namespace(**BASE | changes), BLOCK)
        space = lookup.space(**{name: None if name in changes else WHO[name] for name in ("salt", "adapter")})
        assert lookup.locate(space, Content(TOKENS, MEDIA)) == {}, changes
    assert manager.locate(TOKENS, **WHO) == {state: BLOCKS * BLOCK}


def _namespaces() -> list[dict[str, Any]]:
    assert set(CHANGES) == set(BASE) == {item.name for item in fields(Namespace)}, "a field without a variant"
    return [{name: value} for name, values in CHANGES.items() for value in values]


def test_a_directory_reopened_under_another_namespace_serves_nothing_of_it(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        _serve(manager, "base", TOKENS, WHO)
    for changes in _namespaces():
        who = WHO | {name: None for name in ("salt", "adapter") if name in changes}
        if changes.keys() <= {"block_size", "dtype", "layout"}:  # pages of another shape: the whole store is refused
            with pytest.raises(ValueError, match="another geometry"):
                _manager(tmp_path, **changes)
            continue
        with _manager(tmp_path, **changes) as manager:
            assert manager.locate(TOKENS, **who) == {}, changes
            assert manager.prefetch(TOKENS, **who).found == 0, changes
    with _manager(tmp_path) as manager:
        assert manager.prefetch(TOKENS, **WHO).found == BLOCKS
        assert _serve(manager, "again", TOKENS, WHO) == BLOCKS * BLOCK


def _look_ahead(manager: CacheManager) -> None:
    """Some steps, in which what is expected is ordered, and until it is there."""
    for _ in range(4):
        manager.poll()
    assert manager.flush()


def test_no_call_leaves_the_salt_out(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        _serve(manager, "base", TOKENS, WHO)
        tenant = {name: WHO[name] for name in ("salt", "adapter")}
        for salt, blocks in ((WHO["salt"], BLOCKS), (None, 0), ("tenant-2", 0)):
            who = WHO | {"salt": salt}
            assert sum(manager.locate(TOKENS, **who).values()) == blocks * BLOCK, "locate left the salt out"
            for tier in Tier.DEVICE, Tier.HOST:
                manager.evict(tier, TOKENS, **WHO)
            assert manager.locate(TOKENS, **WHO) == {"disk": BLOCKS * BLOCK}, "evict left the salt out"
            assert manager.prefetch(TOKENS, **who).found == blocks, "a hint left the salt out"
            assert manager.flush()
            manager.evict(Tier.HOST, TOKENS, **WHO)
            manager.expect("next", TOKENS, 60.0, **who)  # so late that it goes no further than to the host
            _look_ahead(manager)
            came = manager.locate(TOKENS, **WHO).get("host", 0)
            assert came == blocks * BLOCK, "an announcement left the salt out"
            manager.dismiss("next")
            manager.poll()
        manager.invalidate(**tenant | {"salt": "tenant-2"})
        assert manager.locate(TOKENS, **WHO), "invalidate left the salt out"
        manager.invalidate(**tenant)
        assert not manager.locate(TOKENS, **WHO), "invalidate left the salt out"


def test_media_reach_every_path(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.get_computed_blocks("first", TOKENS[:5], salt="t")
        assert manager.allocate_slots("first", len(TOKENS)) is not None
        manager.append_tokens("first", TOKENS[5:], media=MEDIA)  # an image in a later turn
        manager.cache_blocks("first", len(TOKENS))
        manager.preempt("first")
        assert manager.resume("first").num_tokens == BLOCKS * BLOCK
        manager.free("first")
        assert manager.flush()
        for media, blocks in ((MEDIA, BLOCKS), ([], 1), ([(5, 10, OTHER_IMAGE)], 1)):
            assert manager.prefetch(TOKENS, salt="t", media=media).found == blocks
            assert sum(manager.locate(TOKENS, salt="t", media=media).values()) == blocks * BLOCK
        for tier in Tier.DEVICE, Tier.HOST:
            assert len(manager.evict(tier, TOKENS, salt="t", media=MEDIA)) == BLOCKS
        for name, media, found in (("a", [(5, 10, OTHER_IMAGE)], 1), ("b", MEDIA, BLOCKS)):
            manager.expect(name, TOKENS, 60.0, salt="t", media=media)  # far off: no further than the host
            _look_ahead(manager)
            assert manager.locate(TOKENS, salt="t", media=MEDIA).get("host", 0) == found * BLOCK
            manager.dismiss(name)
        # A prefix is found whether or not the image goes on behind it.
        assert sum(manager.locate(TOKENS[:8], salt="t", media=MEDIA).values()) == 8
        assert _serve(manager, "other", TOKENS, {"salt": "t", "media": [(5, 10, OTHER_IMAGE)]}) == BLOCK
        manager.evict(Tier.HOST, TOKENS, salt="t", media=MEDIA)
        assert sum(manager.locate(TOKENS, salt="t", media=[(5, 10, OTHER_IMAGE)]).values()) == BLOCKS * BLOCK


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ([(5, 10)], r"media\[0\]: .* expected \(start, length, 32-byte digest\)"),
        ([(5, 10, IMAGE), (5, 10, IMAGE[:2])], r"media\[1\]: digest .* expected 32 bytes"),
        ([(5, 10, 7)], r"media\[0\]: digest 7"),
        ([(-1, 10, IMAGE)], r"media\[0\]: starts at token -1; expected 0 or later"),
        ([(5, 0, IMAGE)], r"media\[0\]: 0 tokens long"),
    ],
)
def test_a_span_that_names_no_media_is_refused_and_changes_nothing(media: Any, words: str, tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        for call in (manager.locate, manager.prefetch, lambda t, **k: manager.get_computed_blocks("r", t, **k)):
            with pytest.raises(ValueError, match=words):
                call(TOKENS, media=media)  # type: ignore[operator]
        manager.get_computed_blocks("s", TOKENS)
        with pytest.raises(ValueError, match=r"starts at token 5; expected 21 or later"):
            manager.append_tokens("s", [1, 2], media=MEDIA)
        assert len(manager._sequences) == 1
        assert manager._sequences["s"].num_tokens == len(TOKENS)


def test_labels_tell_every_two_contents_apart() -> None:
    rng = np.random.default_rng(5)
    seen: dict[bytes, Any] = {}
    for _ in range(500):
        tokens = tuple(rng.integers(0, 2, 8).tolist())
        media = sorted((int(s), int(n), bytes([int(d)] * 32)) for s, n, d in rng.integers((0, 1, 0), (8, 4, 2), (2, 3)))
        labels = Content(tokens, media if rng.random() < 0.5 else media[::-1]).whole(BLOCK)
        for block in range(2):
            touching = [
                (s - BLOCK * block, n, d) for s, n, d in media if s < BLOCK * (block + 1) and s + n > BLOCK * block
            ]
            key = (tokens[BLOCK * block : BLOCK * (block + 1)], tuple(touching))
            assert seen.setdefault(labels[block].tobytes(), key) == key, "a label names two contents"
    assert len(set(map(repr, seen.values()))) == len(seen), "a content has two names"


GOLDEN = """
print(Namespace(**BASE).fingerprint.hex())
for digest in chain_digests(Namespace(**BASE).fingerprint, 0, TOKENS, BLOCK, MEDIA):
    print(digest.hex())
"""
GOLDEN_DIGESTS = """
431213e6392c809722a86516707ac25bf2652009fdd318c21627812f01c1521b
a2418bc42594aeb4ef11e0d56ba744803e00d097f4f40864216247ccb5553d7d
783a85d90b1d810129b120f30b579a3973448a41f6fb6d523a820a0e1c24ee23
bf0c0cf0d5623f8723afeba51e4b68a9363ba97e2e9f1ae81bf4f3e7dff5d6e1
5ff832f2f53459f855109b57b0981addb157d542bcc67d40912fabc936dafb73
d218afd9d79cc8756afd1d1f733ef07ed8c8dcf99989df2e75adbfe49edbf9a9
"""


def test_every_process_and_the_catalog_compute_the_digests_that_were_stored(tmp_path: Path) -> None:
    code = f"BASE, TOKENS, BLOCK, MEDIA = {(BASE, TOKENS, BLOCK, MEDIA)!r}\n"
    code += "from kvtier.namespace import Namespace, chain_digests\n" + GOLDEN
    for seed in ("0", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
        assert run.stdout.split() == GOLDEN_DIGESTS.split()
    with _manager(tmp_path) as manager:
        _serve(manager, "base", TOKENS, {"media": MEDIA})
        root = manager.catalog.root(manager.namespace.fingerprint)
        nodes = manager.catalog.match([root], Content(TOKENS, MEDIA).whole(BLOCK), 0, 1).nodes
        digests = [bytes(identity[:32]).hex() for identity in manager.catalog.identities(nodes)]
        assert digests == GOLDEN_DIGESTS.split()[1:]
