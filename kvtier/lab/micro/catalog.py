"""How long the catalog takes for one long prompt in a large trie, beside passes over the same memory.

Times are CPU time: the catalog never waits, so that is what passes on a processor of one's own, and it leaves out the
other users of a shared one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.catalog import Catalog, PageStatus, Tier, TierSpec
from kvtier.content import Labels, label_words
from kvtier.lab.figures import Figure, paired

BLOCK_SIZE = 16
RUN = 128  # blocks that one chain gains before another one's turn
SPACE = bytes(32)
_OK = int(PageStatus.OK)


@dataclass
class Setting:
    """A trie of ``chains`` interleaved prompts of ``blocks`` blocks each, all ready in the host tier."""

    catalog: Catalog
    root: int
    labels: list[Labels]  # of each chain
    copies: list[Labels]  # the same once more: made in advance, so that a measurement finds it as cold as the trie
    blocks: int
    request: int = 1


def setting(chains: int = 128, blocks: int = 8192, seed: int = 0) -> Setting:
    """Fill a catalog as a server that prefills ``chains`` prompts by turns, ``RUN`` blocks at a time."""
    rng = np.random.default_rng(seed)
    labels = [prompt(rng, blocks) for _ in range(chains)]
    spare = 2 * blocks
    tiers = [TierSpec(Tier.DEVICE, spare), TierSpec(Tier.HOST, chains * blocks + spare)]
    catalog = Catalog(tiers, block_size=BLOCK_SIZE, labels="content", max_nodes=chains * blocks + 4 * spare)
    root = catalog.root(SPACE)
    parents = [root] * chains
    for start in range(0, blocks, RUN):
        for chain in range(chains):
            nodes = catalog.insert(parents[chain], labels[chain][start : start + RUN], chain + 1)
            catalog.adopt(Tier.HOST, nodes, catalog.take(Tier.HOST, nodes.size, chain + 1), chain + 1)
            parents[chain] = int(nodes[-1])
    for chain in range(chains):
        catalog.release(chain + 1)
    return Setting(catalog, root, labels, [one.copy() for one in labels], blocks)


def prompt(rng: np.random.Generator, blocks: int) -> Labels:
    """The labels of random text, as the manager makes them: the tokens, and no media among them."""
    labels = np.zeros((blocks, label_words(BLOCK_SIZE)), np.uint32)
    labels[:, :BLOCK_SIZE] = rng.integers(0, 1 << 17, (blocks, BLOCK_SIZE), dtype=np.uint32)
    return labels


def hit(s: Setting, chain: int) -> float:
    """CPU milliseconds of match + release of a prompt that is ready."""
    start = time.thread_time()
    match = s.catalog.match([s.root], s.labels[chain], 0, s.request)
    s.catalog.release(s.request)
    elapsed = time.thread_time() - start
    assert match.hit == s.blocks
    return elapsed * 1e3


def load(s: Setting, chain: int) -> float:
    """CPU milliseconds of match + reserve (host → device) + settle + narrow + release; the device is emptied after."""
    status = np.full((1, s.blocks), _OK, np.uint8)
    start = time.thread_time()
    match = s.catalog.match([s.root], s.labels[chain], 0, s.request)
    r = s.catalog.reserve([Tier.HOST, Tier.DEVICE], match.nodes, s.request)
    s.catalog.settle(r.ticket, status)
    kept = s.catalog.narrow(s.request, Tier.DEVICE)
    s.catalog.release(s.request)
    elapsed = time.thread_time() - start
    assert kept == s.blocks
    s.catalog.drop(Tier.DEVICE, match.nodes)
    return elapsed * 1e3


def miss(s: Setting, labels: Labels) -> float:
    """CPU milliseconds of match + insert + reserve (engine's end → host) + settle + release of an unknown prompt."""
    status = np.full((1, s.blocks), _OK, np.uint8)
    start = time.thread_time()
    match = s.catalog.match([s.root], labels, 0, s.request)
    nodes = s.catalog.insert(s.root, labels, s.request)
    r = s.catalog.reserve([Tier.REMOTE, Tier.HOST], nodes)
    s.catalog.settle(r.ticket, status)
    s.catalog.release(s.request)
    elapsed = time.thread_time() - start
    assert (match.hit, r.count) == (0, s.blocks)
    return elapsed * 1e3


def sequential_pass(s: Setting, chain: int) -> float:
    """CPU milliseconds to compare the prompt's labels with a copy, in order: the least that an exact match reads."""
    start = time.thread_time()
    same = bool((s.labels[chain] == s.copies[chain]).all())
    elapsed = time.thread_time() - start
    assert same
    return elapsed * 1e3


def use_others(s: Setting, chain: int | None = None) -> None:
    """Find every prompt but ``chain``: some 250 MB at full size, so that what belongs to it leaves the caches.

    That is how a chain gets cold in a server. Writing as many bytes of junk instead would leave the caches full of
    lines that have yet to be written back, at the cost of whoever comes next.
    """
    for other, labels in enumerate(s.labels):
        if other != chain:
            s.catalog.match([s.root], labels, 0, s.request)
            s.catalog.release(s.request)


def figures(chains: int = 128, blocks: int = 8192, pairs: int = 7) -> Iterator[Figure]:
    """Aims: below 0.3 ms for a warm hit, below 1 ms for the others (131,072 tokens in a trie of a million nodes)."""
    s = setting(chains, blocks)
    rng = np.random.default_rng(1)
    size = f"{blocks * BLOCK_SIZE:,} tokens, {chains * blocks:,} nodes"
    limit_is = "numpy compare of the prompt's labels with a copy, one sequential pass, equally warm or cold"

    def warm(measure: Callable[[Setting, int], float]) -> Callable[[], float]:
        return lambda: min(measure(s, 1) for _ in range(3))

    def chilled(measure: Callable[[Setting, int], float]) -> Callable[[], float]:
        def once() -> float:
            chain = int(rng.integers(2, chains))
            use_others(s, chain)
            return measure(s, chain)

        return once

    def unknown(cold: bool) -> Callable[[], float]:
        def once() -> float:
            labels = prompt(rng, blocks)
            if cold:
                use_others(s)
            return miss(s, labels)

        return once

    for name, ours, limit in (
        ("catalog hit, warm: match + release", warm(hit), warm(sequential_pass)),
        ("catalog hit, cold: match + release", chilled(hit), chilled(sequential_pass)),
        ("catalog load, warm: match + reserve + settle + narrow + release", warm(load), warm(sequential_pass)),
        ("catalog load, cold: match + reserve + settle + narrow + release", chilled(load), chilled(sequential_pass)),
        ("catalog miss: match + insert + reserve + settle + release", unknown(cold=False), warm(sequential_pass)),
        ("catalog miss, cold: the same", unknown(cold=True), chilled(sequential_pass)),
    ):
        yield paired(ours, limit, pairs).figure(f"{name} ({size}; CPU time)", "ms", limit_is)
