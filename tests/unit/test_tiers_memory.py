"""The device's and the host's pages as Python sees them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier import _core
from kvtier.geometry import LAYOUTS, KVGeometry
from kvtier.tiers.device import DevicePool
from kvtier.tiers.host import HostArena

SEED = 40


def geometry(layout: str, dtype: str = "float16") -> KVGeometry:
    latent = layout.startswith("mla.")
    return KVGeometry(
        layers=3, kv_heads=1 if latent else 2, head_dim=24 if latent else 16, dtype=dtype, block_size=8,
        latent=latent, layout=layout,
    )  # fmt: skip


def block_values(tensors: list[np.ndarray], layout: str, slot: int) -> list[np.ndarray]:
    axis = LAYOUTS[layout].axes.index("b")
    return [np.take(t, slot, axis=axis) for t in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_survives_the_way_down_and_up(layout: str) -> None:
    rng = np.random.default_rng(SEED)
    pool = DevicePool.allocate(geometry(layout), 5)
    tensors = pool.tensors
    for t in tensors:
        t[...] = rng.standard_normal(t.shape)
    before = [t.copy() for t in tensors]
    arena = HostArena(2, pool.geometry)
    value = pool.native.gather(3, arena.page(1), 1, 2)
    assert value == _core.checksum(arena.page(1)[: pool.payload_bytes], 1, 2)
    pool.native.scatter(1, arena.page(1))
    for old, new in zip(block_values(before, layout, 3), block_values(tensors, layout, 1), strict=True):
        assert np.array_equal(old, new)
    for slot in (0, 2, 3, 4):
        for old, new in zip(block_values(before, layout, slot), block_values(tensors, layout, slot), strict=True):
            assert np.array_equal(old, new)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_its_arrays_in_layer_order_and_memory_order(layout: str) -> None:
    rng = np.random.default_rng(SEED + 1)
    pool = DevicePool.allocate(geometry(layout), 3)
    kind = LAYOUTS[layout]
    inside = [axis for axis in kind.axes if axis != "b"]
    in_memory = [axis for axis in kind.order if axis in inside]
    for t in pool.tensors:
        t[...] = rng.standard_normal(t.shape)
    blocks = block_values(pool.tensors, layout, 2)
    want = [block.transpose([inside.index(axis) for axis in in_memory]).ravel() for block in blocks]
    assert np.array_equal(pool.read_page(2).view(np.float16), np.concatenate(want))


def test_segments_merge_as_far_as_memory_allows() -> None:
    pieces = {tag: DevicePool.allocate(geometry(tag), 4).segments for tag in LAYOUTS}
    assert pieces == {
        "stacked.b2hnd": 3, "stacked.b2nhd": 3, "stacked.2bhnd": 6, "stacked.2bnhd": 6, "split.bhnd": 6,
        "split.bnhd": 6, "vllm.lbhnc": 3, "vllm.blhnc": 1, "vllm.lbnhc": 3, "vllm.blnhc": 1, "mla.bnc": 3,
    }  # fmt: skip
    assert DevicePool.allocate(geometry("vllm.blhnc"), 1).segments == 1


def test_write_read_and_fill_touch_only_their_slots() -> None:
    rng = np.random.default_rng(SEED + 2)
    pool = DevicePool.allocate(geometry("split.bnhd"), 6)
    pages = [rng.integers(0, 256, pool.payload_bytes, dtype=np.uint8) for _ in range(6)]
    for slot, page in enumerate(pages):
        pool.write_page(slot, page)
    pool.fill([1, 4], 0xAB)
    for slot, page in enumerate(pages):
        want = np.full_like(page, 0xAB) if slot in (1, 4) else page
        assert np.array_equal(pool.read_page(slot), want)
    padded = np.zeros(pool.page_bytes, np.uint8)
    padded[: pool.payload_bytes] = pages[1]
    pool.write_page(1, padded)
    assert np.array_equal(pool.read_page(1), pages[1])


def test_device_pool_names_a_wrong_slot_page_and_count() -> None:
    pool = DevicePool.allocate(geometry("split.bnhd"), 2)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match=f"device slot {slot}; expected 0 to 1"):
            pool.read_page(slot)
        with pytest.raises(ValueError, match=f"device slot {slot}"):
            pool.fill([slot], 0)
    with pytest.raises(ValueError, match=r"device page of shape \[5\]; expected \[3072\]"):
        pool.write_page(0, np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="slots is 0"):
        DevicePool.allocate(geometry("split.bnhd"), 0)


def test_device_pool_keeps_its_arrays_alive() -> None:
    tensors = geometry("split.bnhd").allocate(2)
    tensors[0][:] = 1.0
    pool = DevicePool(geometry("split.bnhd"), tensors)
    want = pool.read_page(0)
    del tensors[:]  # the caller's list is emptied; the arrays must not go with it
    gc.collect()
    assert np.array_equal(pool.read_page(0), want)


def test_host_pages_are_padded_apart_and_zero() -> None:
    arena = HostArena(5, 5000)
    assert (arena.slots, arena.payload_bytes, arena.page_bytes, arena.bytes) == (5, 5000, 8192, 5 * 8192)
    assert arena.native.base % (2 << 20) == 0
    for slot in range(5):
        page = arena.page(slot)
        assert page.ctypes.data == arena.native.base + slot * 8192
        assert page.size == 8192
        assert not page.any()
        page[:] = slot
    assert [int(arena.page(slot)[17]) for slot in range(5)] == [0, 1, 2, 3, 4]


def test_host_pages_have_no_checksum_until_one_is_set() -> None:
    arena = HostArena(3, 64)
    assert [arena.checksum(slot) for slot in range(3)] == [0, 0, 0]
    arena.set_checksum(1, (1 << 64) - 1)
    assert [arena.checksum(slot) for slot in range(3)] == [0, (1 << 64) - 1, 0]


def test_host_page_view_outlives_its_arena() -> None:
    arena = HostArena(1, 4096)
    page = arena.page(0)
    page[:] = 7
    del arena
    gc.collect()
    assert page.sum() == 7 * 4096


def test_host_arena_is_resident_when_made_and_returned_when_gone() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    size = 64 << 20
    before = resident()
    arena = HostArena(size // (64 << 10), 64 << 10)
    assert resident() - before > size * 0.9
    del arena
    gc.collect()
    assert resident() - before < size * 0.5


def test_host_arena_says_truly_whether_its_pages_are_huge() -> None:
    arena = HostArena(64, 1 << 20)
    huge = 0
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first:
                low, high = (int(x, 16) for x in first.split("-"))
                inside = low < arena.native.base + arena.bytes and high > arena.native.base
            elif inside and first == "AnonHugePages:":
                huge += int(line.split()[1]) * 1024
    assert arena.huge_pages == (min(huge, arena.native.mapped_bytes) >= 0.9 * arena.native.mapped_bytes)
    assert "64 pages of 1 MiB" in arena.describe()


def several_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: str) -> None:
    (tmp_path / "has_memory").write_text(nodes + "\n")
    monkeypatch.setattr("kvtier.tiers.host._NODES", tmp_path / "has_memory")


def test_host_memory_is_of_the_node_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    several_nodes(monkeypatch, tmp_path, "0-1")
    arena = HostArena(4, 1 << 20, numa_node=0)
    if arena.native.numa_error or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    maps = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    below = [(int(start, 16), policy) for start, policy, *_ in maps if int(start, 16) <= arena.native.base]
    assert max(below)[1] == "prefer:0"
    assert (arena.numa_node, arena.warning) == (0, "")
    assert arena.describe().endswith(", on NUMA node 0")
    assert "NUMA" not in HostArena(1, 4096).describe()


@pytest.mark.parametrize("nodes", ["0", "1", ""])
def test_where_there_is_one_node_none_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: str) -> None:
    several_nodes(monkeypatch, tmp_path, nodes)
    if not nodes:
        (tmp_path / "has_memory").unlink()  # a kernel without NUMA
    arena = HostArena(1, 4096, numa_node=500)
    assert (arena.numa_node, arena.warning, arena.native.numa_error) == (-1, "", 0)


def test_a_node_that_is_refused_is_told_and_the_memory_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    several_nodes(monkeypatch, tmp_path, "0,2-3")
    plan = _core.FaultPlan()
    plan.add(_core.FaultPlan.Kind.ERROR, 2, errno.EPERM, on=_core.FaultPlan.On.MEMORY)  # 1: the mapping
    _core.use_faults(plan)
    try:
        refused = HostArena(2, 4096, numa_node=3)
    finally:
        _core.use_faults(None)
    absent = HostArena(2, 4096, numa_node=1023)  # by the kernel itself
    for arena, node in ((refused, 3), (absent, 1023)):
        assert arena.numa_node == -1
        assert f"could not be put on NUMA node {node} (" in arena.warning
        assert f"numactl --preferred={node}" in arena.warning
        assert "NUMA" not in arena.describe()
        arena.page(1)[:] = 9
        assert int(arena.page(1).sum()) == 9 * 4096
    assert "Operation not permitted" in refused.warning


def test_host_arena_refuses_more_than_the_machine_has() -> None:
    with pytest.raises(MemoryError, match=r"needs 1048576\.00 GiB \(1125899906842624 bytes\): only .* are available"):
        HostArena(1 << 20, 1 << 30)


def test_host_arena_names_its_size_when_the_mapping_is_refused() -> None:
    code = (
        "import resource; from kvtier.tiers.host import HostArena\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try: HostArena(48, 64 << 20)\n"
        "except MemoryError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "needs 3.00 GiB (3221225472 bytes): " in done.stdout


@pytest.mark.parametrize("slots", [0, -1, 1 << 32, 1.5, True])
def test_host_arena_names_a_wrong_number_of_slots(slots: object) -> None:
    with pytest.raises(ValueError, match="host arena: slots is"):
        HostArena(slots, 4096)  # type: ignore[arg-type]


def test_host_arena_names_a_wrong_page_size_and_slot() -> None:
    for payload in (0, -4096, (1 << 31) + 1):
        with pytest.raises(ValueError, match="host arena: payload_bytes is"):
            HostArena(1, payload)
    arena = HostArena(2, 64)
    for call in (arena.page, arena.checksum, lambda slot: arena.set_checksum(slot, 1)):
        for slot in (-1, 2):
            with pytest.raises(ValueError, match=f"host slot {slot}; expected 0 to 1"):
                call(slot)


def test_copy_figures_measure_every_setting_beside_a_limit() -> None:
    from kvtier.lab.micro.copy import figures

    found = list(figures(pages=[16 << 10, 64 << 10], runs=[1, 16], total=4 << 20, pairs=1))
    assert len(found) == 4 + 4 + 3  # 16 KiB in 16 runs would be shorter than anything real
    assert all(f.value > 0 and f.limit is not None and f.ratio is not None and f.unit == "GB/s" for f in found)
