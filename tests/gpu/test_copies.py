"""What only a card can show: the same bytes as the CPU's copies, in order with streams that are busy.

Needs no more than numpy and torch beside the native engine, so that it runs wherever there is a GPU.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kvtier import _core

torch = pytest.importorskip("torch", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

PATHS = ["pieces", "batch", "direct", "staged"]
SLOTS = 24


@pytest.fixture(scope="module")
def device() -> _core.CudaDevice:
    if _core.cuda_status()["built_for"]:
        return _core.CudaDevice.open(0)
    from kvtier.tiers.cuda import compile_kernels

    return _core.CudaDevice.open(0, compile_kernels(_core.cuda_capability(0)))


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Pools:
    """A random pool on the device, the same in host memory for the CPU to copy from, and an arena."""

    def __init__(self, device: _core.CudaDevice, seed: int) -> None:
        draw = random.Random(seed)
        count, on_lanes = draw.choice([1, 2, 5, 33]), draw.random() < 0.7
        step = 16 if on_lanes else 1
        alike = draw.random() < 0.5
        common = step * draw.randint(1, 70_000 // step)
        lengths = [common if alike else step * draw.randint(1, 9000 // step) for _ in range(count)]
        self.payload = sum(lengths)
        self.memory = torch.randint(0, 256, (SLOTS * self.payload,), dtype=torch.uint8, device="cuda")
        self.twin = self.memory.cpu().numpy()
        offsets = np.cumsum([0, *(SLOTS * length for length in lengths)])[:-1]
        bases = self.memory.data_ptr(), self.twin.ctypes.data
        self.native, self.cpu = (
            _core.DevicePool([(base + int(o), n, n) for o, n in zip(offsets, lengths, strict=True)], SLOTS)
            for base in bases
        )
        self.arena = _core.HostArena(SLOTS, self.payload)
        self.pinned = _core.PinnedArena(device, self.arena)
        self.pinned.wait()
        assert self.pinned.pinned == SLOTS, self.pinned.note()

    def page(self, slot: int, lo: int, hi: int) -> tuple[np.ndarray, int]:
        page = np.empty(self.arena.page_bytes, np.uint8)
        return page, self.cpu.gather(slot, page, lo, hi)


def submit(mover: _core.Mover, ticket: int, path: list[_core.Tier], slots: np.ndarray) -> None:
    identities = np.zeros((slots.shape[1], 176), np.uint8)
    identities[:, 0] = slots[0]
    identities[:, 8] = 7
    assert mover.submit(ticket, path, slots, identities, 0, 0.0, stream())


def finish(mover: _core.Mover) -> np.ndarray:
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if done := mover.poll():
            return done[0].status[0]
        mover.wait(1.0)
    raise AssertionError("nothing was reported")


D, H = _core.Tier.DEVICE, _core.Tier.HOST


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host_calls", [False, True])
def test_pages_and_checksums_are_those_of_the_cpu(device: _core.CudaDevice, path: str, host_calls: bool) -> None:
    for seed in range(30):
        pools = Pools(device, seed)
        copies = _core.CudaCopies(device, pools.pinned, offload=path, onboard=path, host_calls=host_calls)
        mover = _core.Mover(pools.native, pools.arena, None, cuda=copies)
        draw = np.random.default_rng(seed)
        slots, pages, back = (draw.permutation(SLOTS)[:13].astype(np.uint32) for _ in range(3))
        submit(mover, 1, [D, H], np.stack([slots, pages]))
        assert (finish(mover) == 1).all()
        for slot, page in zip(slots, pages, strict=True):
            wanted, checksum = pools.page(int(slot), int(slot), 7)
            assert np.array_equal(pools.arena.page(int(page)), wanted), (seed, slot)
            assert pools.arena.checksum(int(page)) == checksum, (seed, slot)
        submit(mover, 2, [H, D], np.stack([pages, back]))
        assert (finish(mover) == 1).all()
        for slot, target in zip(slots, back, strict=True):
            pools.cpu.scatter(int(target), pools.arena.page(int(pages[list(slots).index(slot)])))
        assert np.array_equal(pools.memory.cpu().numpy(), pools.twin), seed
        assert mover.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_store_reads_what_the_queued_step_writes_and_a_load_overwrites_what_it_has_read(
    device: _core.CudaDevice, path: str
) -> None:
    slots = 32
    memory = torch.zeros(slots, 1 << 18, dtype=torch.uint8, device="cuda")
    pool = _core.DevicePool(
        [(memory.data_ptr() + part, 1 << 18, 1 << 16) for part in range(0, 1 << 18, 1 << 16)], slots
    )
    arena = _core.HostArena(slots, 1 << 18)
    pinned = _core.PinnedArena(device, arena)
    pinned.wait()
    mover = _core.Mover(pool, arena, None, cuda=_core.CudaCopies(device, pinned, offload=path, onboard=path))
    every = np.arange(slots, dtype=np.uint32)
    seen = torch.zeros_like(memory)
    for turn in range(1, 6):
        torch.cuda._sleep(20_000_000)  # the step is still to come when the store is submitted
        memory.fill_(turn)
        submit(mover, 2 * turn, [D, H], np.stack([every, every]))
        assert (finish(mover) == 1).all()
        assert all((arena.page(slot) == turn).all() for slot in range(slots))
        for slot in range(slots):
            arena.page(slot)[:] = 100 + turn
        torch.cuda._sleep(20_000_000)
        seen.copy_(memory)  # the last reader of what is loaded over
        submit(mover, 2 * turn + 1, [H, D], np.stack([every, every]))
        assert (finish(mover) == 1).all()
        assert (memory == 100 + turn).all().item()
        assert (seen == turn).all().item()
    assert mover.close()


def test_a_step_captured_in_a_graph_is_waited_for_when_it_is_replayed(device: _core.CudaDevice) -> None:
    memory = torch.zeros(8, 1 << 16, dtype=torch.uint8, device="cuda")
    pool = _core.DevicePool([(memory.data_ptr(), 1 << 16, 1 << 16)], 8)
    arena = _core.HostArena(8, 1 << 16)
    mover = _core.Mover(pool, arena, None, cuda=_core.CudaCopies(device, _core.PinnedArena(device, arena)))
    every = np.arange(8, dtype=np.uint32)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    identities = np.zeros((8, 176), np.uint8)
    with torch.cuda.graph(graph, stream=side):
        torch.cuda._sleep(20_000_000)
        memory.add_(1)
        refused = mover.submit(1, [D, H], np.stack([every, every]), identities, 0, 0.0, stream())
    assert not refused
    assert "captured into a graph" in mover.stats()["device_note"]
    with torch.cuda.stream(side):
        for turn in range(1, 5):
            graph.replay()
            submit(mover, turn, [D, H], np.stack([every, every]))
            assert (finish(mover) == 1).all()
            assert (arena.page(3) == turn).all()
    assert mover.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host_calls", [False, True])
def test_transfers_and_pinning_go_on_while_a_graph_is_captured_and_it_is_whole(
    device: _core.CudaDevice, path: str, host_calls: bool
) -> None:
    """In the mode of capture that torch takes, in which no thread may look at an event or pin memory by default."""
    slots, part = 16, 1 << 18
    memory = torch.zeros(slots, part, dtype=torch.uint8, device="cuda")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    pool = _core.DevicePool([(memory.data_ptr() + at, part, part // 4) for at in range(0, part, part // 4)], slots)
    arena, other = _core.HostArena(slots, part), _core.HostArena(128, 1 << 20)
    pinned = _core.PinnedArena(device, arena)
    pinned.wait()
    copies = _core.CudaCopies(device, pinned, offload=path, onboard=path, host_calls=host_calls)
    mover = _core.Mover(pool, arena, None, cuda=copies)
    every = np.arange(slots, dtype=np.uint32)
    graph, side, work = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()

    def step(value: int) -> None:
        """The engine's, which takes some 0.1 s, on a stream that is not captured."""
        with torch.cuda.stream(work):
            torch.cuda._sleep(200_000_000)
            memory.fill_(value)

    def move(ticket: int, way: list[_core.Tier]) -> None:
        with torch.cuda.stream(work):
            submit(mover, ticket, way, np.stack([every, every]))

    with torch.cuda.stream(side):  # every kernel once, so that none is loaded during the capture
        count.add_(0)
    step(1)
    move(1, [D, H])
    assert (finish(mover) == 1).all()
    step(2)
    move(2, [D, H])  # under way when the capture begins
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        count.add_(1)
        late = _core.PinnedArena(device, other)
        assert (finish(mover) == 1).all()
        assert (arena.page(5) == 2).all()
        step(3)
        move(3, [D, H])  # begun and ended during the capture
        assert (finish(mover) == 1).all()
        assert (arena.page(5) == 3).all()
        step(4)
        move(4, [H, D])
        assert (finish(mover) == 1).all()
        late.wait()
        assert late.pinned == 128, late.note()
        page = np.zeros(arena.page_bytes, np.uint8)
        device.read_page(pool, 5, page, int(work.cuda_stream))
        assert (page[:part] == 3).all()
        refused = mover.submit(9, [D, H], np.stack([every, every]), np.zeros((slots, 176), np.uint8), 0, 0.0, stream())
        graph.capture_end()
    assert not refused
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert count.item() == 3
    assert (memory == 3).all().item()
    assert mover.close()


def test_memory_of_the_host_is_no_device_pool(device: _core.CudaDevice) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    pool = _core.DevicePool([(memory.ctypes.data, 1 << 16, 1 << 16)], 1)
    arena = _core.HostArena(1, 1 << 16)
    with pytest.raises(ValueError, match=r"memory that CUDA does not know|host memory"):
        _core.Mover(pool, arena, None, cuda=_core.CudaCopies(device, _core.PinnedArena(device, arena)))


def test_the_kernels_compiled_at_run_time_copy_as_the_built_ones() -> None:
    pytest.importorskip("cupy")
    from kvtier.tiers.cuda import compile_kernels

    device = _core.CudaDevice.open(0, compile_kernels(_core.cuda_capability(0)))
    pools = Pools(device, 3)
    copies = _core.CudaCopies(device, pools.pinned)
    every = np.arange(SLOTS, dtype=np.uint32)
    _core.measure_path(copies, pools.native, pools.arena, True, every, every, 1)
    for slot in range(SLOTS):
        assert np.array_equal(pools.arena.page(slot), pools.page(slot, 0, 0)[0])
