"""The page checksum and the copies between segments and pages, against plain definitions in Python."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import _core

U64 = (1 << 64) - 1
SEED = 20260
SETS = ["scalar", "avx2", "avx512"]


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)


def m(x: int) -> int:
    return (x & 0xFFFFFFFF) * (x >> 32)


def defined_checksum(payload: bytes, lo: int, hi: int) -> int:
    """checksum.hpp's definition, word for word."""
    k1 = mix(lo ^ 0x6B76746965722E31)
    k2 = mix((hi + k1 + 0xD6E8FEB86659FD93) & U64)
    total_a = total_b = 0
    padded = payload + bytes(-len(payload) % 16)
    for i in range(len(padded) // 16):
        a, b = (int.from_bytes(padded[16 * i + 8 * w :][:8], "little") for w in (0, 1))
        p = (k1 + i * 0x9E3779B97F4A7C15) & U64
        q = (k2 + i * 0xC2B2AE3D27D4EB4F) & U64
        a = (a + m(b ^ p)) & U64
        b = (b + m(a ^ q)) & U64
        a = (a + m(b ^ p)) & U64
        total_a, total_b = (total_a + a) & U64, (total_b + b) & U64
    value = mix(mix((total_a + len(payload) * 0x9E3779B97F4A7C15) & U64) ^ ((total_b + k2) & U64))
    return value or 1


def random_bytes(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 256, n, dtype=np.uint8)


def by(kernels: str, page: np.ndarray, lo: int = 1, hi: int = 2) -> int:
    try:
        return _core.checksum_by(page, lo, hi, kernels)
    except ValueError:
        pytest.skip(f"this processor has no {kernels}")


# Stored on disk with every page: a change here makes every store unreadable and needs a new definition version.
GOLDEN = [
    (b"", 0, 0),
    (b"\x00" * 16, 0, 0),
    (b"\x00" * 4096, 1, 2),
    (bytes(range(256)) * 5 + b"tail", 0x0123456789ABCDEF, 0xFEDCBA9876543210),
]
GOLDEN_VALUES = [0x9F4851C314BA890B, 0xE4F89CEB85F939B7, 0x57EA9AC3CABA881F, 0x20A3A28C08B0F4DA]


@pytest.mark.parametrize("kernels", SETS)
def test_checksum_keeps_its_golden_values(kernels: str) -> None:
    for (payload, lo, hi), value in zip(GOLDEN, GOLDEN_VALUES, strict=True):
        assert by(kernels, np.frombuffer(payload, np.uint8), lo, hi) == value
        assert defined_checksum(payload, lo, hi) == value


@pytest.mark.parametrize("kernels", SETS)
def test_every_kernel_gives_the_defined_checksum_at_every_length(kernels: str) -> None:
    rng = np.random.default_rng(SEED)
    data = random_bytes(rng, 3000)
    for length in [*range(70), *rng.integers(70, 3000, 60).tolist()]:
        start = int(rng.integers(0, 3000 - length + 1))
        part = data[start : start + length]
        lo, hi = (int(x) for x in rng.integers(0, U64, 2, dtype=np.uint64))
        assert by(kernels, part, lo, hi) == defined_checksum(part.tobytes(), lo, hi), (length, start)


@pytest.mark.parametrize("kernels", SETS[1:])
def test_vector_kernels_agree_with_the_scalar_one_on_pages(kernels: str) -> None:
    rng = np.random.default_rng(SEED + 1)
    data = random_bytes(rng, 1 << 20)
    edges = [32 * 1024, 128 * 1024]
    lengths = [e + d for e in edges for d in (-16, -1, 0, 1, 15, 16, 256, 4096 + 7)]
    for length in [*lengths, *rng.integers(1, 1 << 20, 40).tolist()]:
        start = int(rng.integers(0, len(data) - length + 1))
        part = data[start : start + length]
        assert by(kernels, part) == by("scalar", part), (length, start)


def test_checksum_depends_on_key_and_length() -> None:
    page = np.zeros(4096, np.uint8)
    values = {_core.checksum(page, lo, hi) for lo in range(40) for hi in range(40)}
    values |= {_core.checksum(page[:n], 0, 0) for n in range(4096)}
    assert len(values) == 40 * 40 + 4096
    assert 0 not in values


@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_checksum_sees_every_flipped_bit(fill: str) -> None:
    rng = np.random.default_rng(SEED + 2)
    page = {"zeros": np.zeros(1024, np.uint8), "ones": np.full(1024, 255, np.uint8), "random": random_bytes(rng, 1024)}
    data = page[fill].copy()
    seen = {_core.checksum(data, 7, 8)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << (bit % 8)
        seen.add(_core.checksum(data, 7, 8))
        data[bit // 8] ^= 1 << (bit % 8)
    assert len(seen) == 8 * len(data) + 1


def test_flipped_bits_change_half_of_the_checksum() -> None:
    rng = np.random.default_rng(SEED + 3)
    data = random_bytes(rng, 512)
    base = _core.checksum(data, 7, 8)
    flips = np.zeros(64)
    trials = 8 * len(data)
    for bit in range(trials):
        data[bit // 8] ^= 1 << (bit % 8)
        changed = base ^ _core.checksum(data, 7, 8)
        flips += [changed >> i & 1 for i in range(64)]
        data[bit // 8] ^= 1 << (bit % 8)
    # 6 standard deviations of a fair coin, per output bit
    assert np.all(np.abs(flips - trials / 2) < 6 * np.sqrt(trials / 4)), flips


@pytest.mark.parametrize("unit", [2, 8, 16, 64, 4096])
def test_checksum_sees_swapped_pieces(unit: int) -> None:
    # Pieces that differ in one bit only are the hardest: in sums they cancel when a swap is not keyed by position.
    rng = np.random.default_rng(SEED + 4)
    pieces = 16384 // unit
    for trial in range(400):
        data = np.zeros(16384, np.uint8) if trial % 2 else random_bytes(rng, 16384)
        view = data.reshape(pieces, unit)
        i, j = rng.choice(pieces, 2, replace=False)
        view[j] = view[i]
        view[j, rng.integers(unit)] ^= 1 << rng.integers(8)
        before = _core.checksum(data, 3, 4)
        view[[i, j]] = view[[j, i]]
        assert _core.checksum(data, 3, 4) != before, (trial, i, j)


def segment_pool(buffers: list[np.ndarray]) -> _core.DevicePool:
    """One segment per buffer of shape (slots, length)."""
    segments = [(b.ctypes.data, b.strides[0], b.shape[1]) for b in buffers]
    return _core.DevicePool(segments, buffers[0].shape[0])


def strided(rng: np.random.Generator, slots: int, length: int, gap: int) -> np.ndarray:
    return random_bytes(rng, slots * (length + gap)).reshape(slots, length + gap)[:, :length]


LENGTHS = [
    [4096],
    [16, 32, 4096, 48],
    [65536, 65536],
    [40000, 200000, 16],
    [1],
    [17, 5, 4096, 3],  # off the lanes
    [131072 + 8, 40],
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("gap", [0, 16, 7])
def test_gather_copies_pads_and_sums_a_page(lengths: list[int], gap: int) -> None:
    rng = np.random.default_rng(SEED + 5)
    buffers = [strided(rng, 3, n, gap) for n in lengths]
    pool = segment_pool(buffers)
    payload = sum(lengths)
    arena = _core.HostArena(1, payload)
    page = arena.page(0)
    for slot in (2, 0, 1):
        page[:] = 0xEE
        value = pool.gather(slot, page, 11, 12)
        want = np.concatenate([b[slot] for b in buffers])
        assert np.array_equal(page[:payload], want)
        assert not page[payload:].any()
        assert value == by("scalar", want, 11, 12)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("gap", [0, 16, 7])
def test_scatter_writes_one_slot_and_nothing_beside_it(lengths: list[int], gap: int) -> None:
    rng = np.random.default_rng(SEED + 6)
    for verified in (False, True):
        buffers = [strided(rng, 3, n, gap) for n in lengths]
        around = [b.base.copy() if gap else b.copy() for b in buffers]
        pool = segment_pool(buffers)
        page = random_bytes(rng, sum(lengths))
        key = (5, 6)
        if verified:
            assert pool.scatter_verified(1, page, *key, _core.checksum(page, *key))
        else:
            pool.scatter(1, page)
        at = 0
        for buffer, old in zip(buffers, around, strict=True):
            assert np.array_equal(buffer[1], page[at : at + buffer.shape[1]])
            at += buffer.shape[1]
            old = old.reshape(3, -1)
            new = (buffer.base if gap else buffer).reshape(3, -1).copy()
            new[1, : buffer.shape[1]] = old[1, : buffer.shape[1]]
            assert np.array_equal(new, old)


@pytest.mark.parametrize("lengths", [[4096, 4096], [17, 4096]])
def test_verified_scatter_refuses_a_flipped_bit_and_a_foreign_key(lengths: list[int]) -> None:
    rng = np.random.default_rng(SEED + 7)
    buffers = [strided(rng, 2, n, 0) for n in lengths]  # the pool does not keep them alive
    pool = segment_pool(buffers)
    page = random_bytes(rng, sum(lengths))
    expected = _core.checksum(page, 1, 2)
    assert pool.scatter_verified(0, page, 1, 2, expected)
    assert not pool.scatter_verified(0, page, 1, 3, expected)
    page[4000] ^= 1
    assert not pool.scatter_verified(0, page, 1, 2, expected)


def test_swapped_segments_and_pages_change_the_checksum() -> None:
    rng = np.random.default_rng(SEED + 8)
    buffers = [strided(rng, 2, 4096, 0) for _ in range(4)]
    page = np.zeros(4 * 4096, np.uint8)
    value = segment_pool(buffers).gather(0, page, 1, 2)
    assert segment_pool([buffers[1], buffers[0], *buffers[2:]]).gather(0, page, 1, 2) != value
    assert segment_pool(buffers).gather(1, page, 1, 2) != value
    assert segment_pool(buffers).gather(0, page, 2, 1) != value


def test_device_pool_refuses_segments_that_share_a_byte() -> None:
    memory = np.zeros(64 * 1024, np.uint8)
    at = memory.ctypes.data
    _core.DevicePool([(at, 1024, 512), (at + 512, 1024, 512)], 8)  # interleaved, side by side
    for second in [(at + 511, 1024, 512), (at + 7 * 1024 + 511, 512, 512), (at, 1024, 512), (at + 1536 - 1, 1024, 512)]:
        with pytest.raises(ValueError, match=r"segments\[1\] shares memory with segments\[0\]"):
            _core.DevicePool([(at, 1024, 512), second], 8)
    _core.DevicePool([(at, 1024, 512), (at + 8 * 1024, 512, 512)], 8)


@pytest.mark.parametrize(
    ("segments", "slots", "reason"),
    [
        ([], 4, "segments is empty"),
        ([(4096, 16, 16)], 0, "slots is 0"),
        ([(4096, 16, 16)], 0xFFFFFFFF, "slots is 4294967295"),
        ([(0, 16, 16)], 4, r"segments\[0\] has a null base"),
        ([(4096, 16, 0)], 4, r"segments\[0\] has length 0"),
        ([(4096, 15, 16)], 4, r"segments\[0\] has stride 15, less than its length 16"),
        ([(4096, 1 << 62, 16)], 4, "past the address space"),
        ([((1 << 64) - 16, 32, 32)], 1, "past the address space"),
    ],
)
def test_device_pool_names_what_is_wrong(segments: list[tuple[int, int, int]], slots: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _core.DevicePool(segments, slots)


def test_native_calls_refuse_slots_and_pages_out_of_range() -> None:
    buffers = [np.zeros((2, 64), np.uint8)]
    pool = segment_pool(buffers)
    page = np.zeros(64, np.uint8)
    for call in (lambda s, p: pool.gather(s, p), pool.scatter, lambda s, p: pool.scatter_verified(s, p, 0, 0, 1)):
        with pytest.raises(ValueError, match="slot must be less"):
            call(2, page)
        with pytest.raises(ValueError, match="page must hold"):
            call(0, page[:63])
