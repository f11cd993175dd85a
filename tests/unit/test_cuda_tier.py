"""The GPU data plane without a GPU: adoption, the choice of paths, and the whole stack over an emulated device."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier import CacheConfig, CacheManager, KVGeometry, Namespace, _core
from kvtier.catalog import Tier
from kvtier.config import CudaConfig
from kvtier.tiers import copy_paths
from kvtier.tiers.copy_ends import ENDS, Noticing, better, measure_ends
from kvtier.tiers.copy_paths import PATHS, Rates, choose, measure, store
from kvtier.tiers.cuda import CudaDevice, CudaError
from kvtier.tiers.device import DevicePool
from kvtier.tiers.host import HostArena

ROOT = Path(__file__).resolve().parents[2]
BUILD = os.environ.get("KVTIER_TEST_CUDA")  # ON or OFF: how `make test-cuda` built it, with all that the tests need
GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=16, dtype="float16", block_size=4, layout="split.bnhd")


class OnCuda:
    """An array that says it is on a CUDA device, as CuPy's do; its memory is NumPy's."""

    def __init__(self, array: np.ndarray, ordinal: int = 0, **changes: object) -> None:
        self.array, self.shape = array, array.shape
        self.device = type("Device", (), {"id": ordinal})()
        interface = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False),
            "strides": array.strides, "version": 3,
        }  # fmt: skip
        self.__cuda_array_interface__ = interface | changes


class ByDlpack(OnCuda):
    """The same as torch's: DLPack tells the device."""

    def __init__(self, array: np.ndarray, kind: int, ordinal: int = 0) -> None:
        super().__init__(array, ordinal)
        self.kind, self.ordinal = kind, ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.ordinal


def on_cuda(ordinal: int = 0, slots: int = 5) -> list[OnCuda]:
    return [OnCuda(array, ordinal) for array in GEOMETRY.allocate(slots)]


# ---- adoption ----------------------------------------------------------------------------------------------------


def test_arrays_on_a_cuda_device_are_adopted_where_they_are() -> None:
    arrays = on_cuda(ordinal=2)
    adopted = GEOMETRY.adopt(arrays)
    assert adopted.device == 2
    assert adopted.segments[0].base == arrays[0].array.ctypes.data
    assert adopted.segments == GEOMETRY.adopt([a.array for a in arrays]).segments
    assert GEOMETRY.adopt([a.array for a in arrays]).device is None


def test_arrays_on_two_devices_are_refused_by_name() -> None:
    arrays = [*on_cuda()[:5], *on_cuda(ordinal=1)[5:]]
    with pytest.raises(
        ValueError, match=r"tensors\[5\].* is on CUDA device 1; expected on CUDA device 0, as tensors\[0\]"
    ):
        GEOMETRY.adopt(arrays)
    mixed = [*on_cuda()[:5], GEOMETRY.allocate(5)[5]]
    with pytest.raises(ValueError, match=r"tensors\[5\].* is in host memory; expected on CUDA device 0"):
        GEOMETRY.adopt(mixed)


def test_arrays_on_a_device_of_another_kind_are_refused() -> None:
    arrays = [ByDlpack(array, kind=10) for array in GEOMETRY.allocate(2)]  # 10: ROCm
    with pytest.raises(ValueError, match="is on DLPack device type 10; expected an array in host memory or on a CUDA"):
        GEOMETRY.adopt(arrays)


def test_cuda_arrays_that_do_not_lie_as_the_layout_says_are_refused() -> None:
    plain = GEOMETRY.allocate(5)
    turned = np.zeros((5, 2, 4, 16), np.float16).transpose(0, 2, 1, 3)
    with pytest.raises(ValueError, match=r"tensors\[3\].* lies in memory as"):
        GEOMETRY.adopt([OnCuda(turned if i == 3 else array) for i, array in enumerate(plain)])
    with pytest.raises(ValueError, match=r"tensors\[1\] share memory|tensors\[0\] and tensors\[1\]"):
        GEOMETRY.adopt([OnCuda(plain[0]), OnCuda(plain[0]), *map(OnCuda, plain[2:])])
    with pytest.raises(ValueError, match="is read-only"):
        GEOMETRY.adopt([OnCuda(array, data=(array.ctypes.data, True)) for array in plain])


def test_a_pool_on_a_device_that_is_not_there_says_why() -> None:
    if _core.cuda_status()["devices"]:
        pytest.skip("there is a GPU")
    with pytest.raises(CudaError, match=r"CUDA device 0: .*driver"):
        DevicePool(GEOMETRY, on_cuda())
    with pytest.raises(CudaError, match="driver"):
        _core.CudaDevice.open(0)


# ---- which path --------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> DevicePool:
    return DevicePool(GEOMETRY, GEOMETRY.allocate(24), cuda=CudaDevice.emulated_device(seed=3))


def rates(pool: DevicePool, *, ends: dict[str, Noticing] | None = None, **tables: dict[str, float]) -> Rates:
    assert pool.cuda is not None
    slow = dict.fromkeys(PATHS, 1000000000.0)
    found = {"offload": slow, "onboard": slow} | tables
    return Rates(pool.cuda.name, pool.payload_bytes, pool.segments, "2026-12-01", **found, ends=ends or {})


def test_without_a_profile_the_path_is_a_default_and_says_so(pool: DevicePool) -> None:
    choice = choose(CudaConfig(), pool)
    assert (choice.offload, choice.onboard) == ("direct", "direct")
    assert "default for 6 pieces a page, not measured" in choice.describe()
    whole = GEOMETRY.with_(layout="vllm.blhnc")
    one = DevicePool(whole, whole.allocate(4), cuda=pool.cuda)
    assert choose(CudaConfig(), one).offload == "pieces"


def test_the_profile_decides_each_direction_for_its_own_device_and_geometry(pool: DevicePool, tmp_path: Path) -> None:
    profile = tmp_path / "paths.json"
    best = rates(pool, offload={"batch": 40e9, "direct": 30e9}, onboard={"staged": 50e9, "direct": 49e9})
    store(profile, rates(pool))
    store(profile, best)  # in the place of the first
    assert copy_paths.load(profile) == [best]
    assert profile.stat().st_mode & 0o777 == 0o600
    choice = choose(CudaConfig(profile=profile), pool)
    assert (choice.offload, choice.onboard) == ("batch", "staged")
    assert "measured on 2026-12-01: offload 40.0 GB/s, onboard 50.0 GB/s" in choice.describe()
    other = DevicePool(GEOMETRY.with_(layers=2), GEOMETRY.with_(layers=2).allocate(4), cuda=pool.cuda)
    assert "has nothing for this device and geometry" in choose(CudaConfig(profile=profile), other).reason
    forced = choose(CudaConfig(profile=profile, offload="pieces"), pool)
    assert (forced.offload, forced.onboard) == ("pieces", "staged")
    assert forced.reason.startswith("as configured; onboard: fastest when measured")


def test_the_profile_decides_how_ends_are_noticed_unless_that_is_configured(pool: DevicePool, tmp_path: Path) -> None:
    profile = tmp_path / "paths.json"
    config = CudaConfig(profile=profile)
    store(profile, rates(pool))  # as one was written before ends were measured
    assert (choose(config, pool).ends, choose(config, pool).ends_reason) == (
        "poll", "default, not measured on this machine",
    )  # fmt: skip
    measured = rates(pool, ends={"poll": Noticing(80e-6, 0.31), "call": Noticing(61e-6, 0.02)})
    store(profile, measured)
    assert copy_paths.load(profile) == [measured]
    assert choose(config, pool).describe().endswith(
        "ends by call (better when measured on 2026-12-01: poll 80 us a page, 31% of a core; "
        "call 61 us a page, 2% of a core)"
    )  # fmt: skip
    forced = choose(CudaConfig(profile=profile, ends="poll"), pool)
    assert (forced.ends, forced.ends_reason) == ("poll", "as configured")
    assert choose(CudaConfig(), pool).ends == "poll"


def test_the_sooner_end_is_better_and_of_ends_alike_the_one_that_takes_less_of_the_processor() -> None:
    assert better({"poll": Noticing(50e-6, 0.9), "call": Noticing(60e-6, 0.1)}) == "poll"
    assert better({"poll": Noticing(58e-6, 0.9), "call": Noticing(60e-6, 0.1)}) == "call"
    assert better({"poll": Noticing(58e-6, 0.1), "call": Noticing(60e-6, 0.1)}) == "poll"


BAD_ENDS = (
    "[]", "7", '{"shout": {"wait_s": 1, "processor": 0}}', '{"poll": {"wait_s": 1}}',
    '{"poll": {"wait_s": -1, "processor": 0}}', '{"poll": {"wait_s": NaN, "processor": 0}}',
)  # fmt: skip
PROFILE = '{"schema": "kvtier.copy-paths/1", "rates": [RATES]}'
RATES = (
    '{"device": "d", "payload_bytes": 1, "segments": 1, "date": "x", "offload": {"pieces": 1}, '
    '"onboard": {"pieces": 1}, "ends": ENDS}'
)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "other/1", "rates": []}', PROFILE.replace("[RATES]", "7"),
     *(PROFILE.replace("RATES", rates) for rates in ("{}", '"a"', *(RATES.replace("ENDS", ends) for ends in BAD_ENDS)))]
)  # fmt: skip
def test_a_profile_that_is_none_is_named(pool: DevicePool, tmp_path: Path, text: str) -> None:
    profile = tmp_path / "paths.json"
    profile.write_text(text)
    with pytest.raises(ValueError, match=r"cuda\.profile: .*paths\.json.*expected a profile of copy paths"):
        choose(CudaConfig(profile=profile), pool)


def test_measuring_covers_every_path_in_both_directions(pool: DevicePool) -> None:
    found = measure(pool, HostArena(32, GEOMETRY), rounds=1, bytes_a_round=12 * pool.payload_bytes)
    assert found.fits(pool)
    assert set(found.offload) == set(found.onboard) == set(PATHS)
    assert min(*found.offload.values(), *found.onboard.values()) > 0
    assert set(found.ends) == set(ENDS)
    assert all(each.wait_s > 0 and each.processor > 0 for each in found.ends.values())
    with pytest.raises(ValueError, match="expected one on a CUDA device"):
        measure(DevicePool.allocate(GEOMETRY, 2), HostArena(2, GEOMETRY))


def test_measuring_ends_asks_both_ways_for_their_events_and_loads_what_is_there(pool: DevicePool) -> None:
    """By call the driver's thread tells, by poll it is looked: both load the host's own bytes."""
    assert pool.cuda is not None
    arena = HostArena(12, GEOMETRY)
    for slot in range(12):
        arena.page(slot)[:] = 7
    pinned = _core.PinnedArena(pool.cuda.native, arena.native)
    pinned.wait()
    found = measure_ends(pool.cuda.native, pool.native, arena.native, pinned, path="direct", rounds=1)
    assert set(found) == set(ENDS)
    loaded = [slot for slot in range(24) if (pool.read_page(slot) == 7).all()]
    assert len(loaded) == 12
    assert pool.cuda.native.races() == []


def test_a_load_that_does_not_end_while_ends_are_measured_is_told(
    pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.cuda is not None
    device, arena = pool.cuda.native, HostArena(12, GEOMETRY)
    pinned = _core.PinnedArena(device, arena.native)
    pinned.wait()

    class Clock:
        """Of a waiter that looks again only after a long time, and then lets go what it waits for."""

        looks = 0
        process_time = time.process_time

        @classmethod
        def monotonic(cls) -> float:
            cls.looks += 1
            if cls.looks > 1:
                device.hold(0, False)
            return 1e9 * cls.looks

    monkeypatch.setattr("kvtier.tiers.copy_ends.time", Clock)
    device.hold(0)  # the engine's stream, which every load comes after
    with pytest.raises(CudaError, match="a load that was measured did not end within 30 s"):
        measure_ends(device, pool.native, arena.native, pinned, path="direct", rounds=1)


# ---- the whole stack ---------------------------------------------------------------------------------------------


def namespace() -> Namespace:
    return Namespace(
        model="m", revision="1", dtype="float16", layout=GEOMETRY.layout_tag, attention="none",
        block_size=GEOMETRY.block_size, rope={},
    )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ends", ["poll", "call"])
def test_a_prompt_survives_the_way_to_disk_and_back_over_every_path(tmp_path: Path, path: str, ends: str) -> None:
    cuda = CudaDevice.emulated_device(seed=7)
    engine = cuda.native.make_stream()
    cuda.follow(lambda: engine)
    pool = DevicePool(GEOMETRY, GEOMETRY.allocate(16), cuda=cuda)
    config = CacheConfig(
        block_size=4, host={"size": 64 * pool.page_bytes}, disk={"path": tmp_path, "size": "2MiB"},
        cuda={"offload": path, "onboard": path, "ends": ends}, mover={"verify_host": True}, load_policy="always",
    )  # fmt: skip
    tokens = np.arange(33)
    rng = np.random.default_rng(5)
    with CacheManager(config, GEOMETRY, namespace(), pool) as manager:
        assert f"offload {path}, onboard {path} (as configured)" in manager.describe()
        assert "on an emulated device" in manager.describe()
        manager.get_computed_blocks("a", tokens)
        table = manager.allocate_slots("a", 33)
        assert table is not None
        pages = [rng.integers(0, 256, pool.payload_bytes, dtype=np.uint8) for _ in range(8)]
        for slot, page in zip(table, pages, strict=False):
            pool.write_page(int(slot), page)
        manager.cache_blocks("a", 32)
        assert manager.flush(30)
        manager.free("a")
        for tier in (Tier.DEVICE, Tier.HOST):  # first from the host, then from the disk
            emptied = [int(slot) for below in range(tier + 1) for slot in manager.evict(Tier(below), tokens[:32])]
            if tier is Tier.DEVICE:
                pool.fill(emptied, 0xEE)
            assert manager.get_computed_blocks("b", tokens).num_tokens == 32
            assert manager.allocate_slots("b", 33) is not None
            while not manager.ready("b"):
                manager.poll(1.0)
            assert manager.num_computed_tokens("b") == 32
            for slot, page in zip(manager.block_table("b"), pages, strict=False):
                assert np.array_equal(pool.read_page(int(slot)), page)
            assert manager.flush(30)
            manager.free("b")
        assert not manager.stats().failures
        assert not [text for text in manager.plane.warnings() if "copy" in text]
    assert cuda.native.races() == []


def test_host_memory_is_asked_for_near_the_gpu_and_a_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "has_memory").write_text("0-1\n")
    monkeypatch.setattr("kvtier.tiers.host._NODES", tmp_path / "has_memory")
    cuda = CudaDevice.emulated_device()
    cuda.numa_node = 1023  # that no machine has
    pool = DevicePool(GEOMETRY, GEOMETRY.allocate(2), cuda=cuda)
    config = CacheConfig(block_size=4, host={"size": 4 * pool.page_bytes})
    with CacheManager(config, GEOMETRY, namespace(), pool) as manager:
        assert "WARNING the host tier could not be put on NUMA node 1023" in manager.describe()


def test_a_store_waits_for_the_step_that_fills_it() -> None:
    """The engine's queue is held: nothing is stored before it goes on."""
    cuda = CudaDevice.emulated_device()
    engine = cuda.native.make_stream()
    cuda.follow(lambda: engine)
    pool = DevicePool(GEOMETRY, GEOMETRY.allocate(8), cuda=cuda)
    config = CacheConfig(block_size=4, host={"size": 16 * pool.page_bytes})
    with CacheManager(config, GEOMETRY, namespace(), pool) as manager:
        manager.get_computed_blocks("a", np.arange(17))
        assert manager.allocate_slots("a", 17) is not None
        cuda.native.hold(engine)
        manager.cache_blocks("a", 16)
        assert not manager.flush(0.2)
        cuda.native.hold(engine, False)
        assert manager.flush(30)
        assert manager.stats().bytes_moved["device_to_host"] == 4 * pool.page_bytes


@pytest.mark.parametrize("other", ["poll", "cache_blocks"])
def test_a_store_waits_for_the_stream_of_its_own_step_whichever_is_current_when_it_is_ordered(other: str) -> None:
    cuda = CudaDevice.emulated_device()
    filling, current = cuda.native.make_stream(), cuda.native.make_stream()
    under = [filling]
    cuda.follow(lambda: under[0])
    pool = DevicePool(GEOMETRY, GEOMETRY.allocate(12), cuda=cuda)
    config = CacheConfig(block_size=4, host={"size": 16 * pool.page_bytes})
    with CacheManager(config, GEOMETRY, namespace(), pool) as manager:
        for name, first in (("a", 0), ("b", 100)):
            manager.get_computed_blocks(name, np.arange(first, first + 17))
            assert manager.allocate_slots(name, 17) is not None
        cuda.native.hold(filling)
        manager.cache_blocks("a", 16)
        under[0] = current
        if other == "cache_blocks":
            manager.cache_blocks("b", 16)
        assert not manager.flush(0.2)
        assert not manager.stats().bytes_moved
        cuda.native.hold(filling, False)
        assert manager.flush(30)
    assert cuda.native.races() == []


# ---- the kernels as the compilers see them -----------------------------------------------------------------------


@pytest.mark.skipif(
    BUILD == "OFF" or (not BUILD and shutil.which("nvcc") is None), reason="needs nvcc: `make test-cuda` brings it"
)
def test_kernels_move_16_bytes_at_a_time_and_keep_all_in_registers(tmp_path: Path) -> None:
    source = ROOT / "csrc" / "cuda" / "page_copy.cu"
    common = ["nvcc", "-std=c++17", "-I", str(ROOT / "csrc")]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ((80, 90, 100) if BUILD else (90,))]
    made = subprocess.run(
        [*common, *targets, "-fatbin", "-Xptxas", "-v", "-o", str(tmp_path / "k.fatbin"), str(source)],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    reports = [line for line in (made.stdout + made.stderr).splitlines() if "stack frame" in line]
    assert len(reports) == 6 * len(targets)
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in reports)
    ptx = tmp_path / "k.ptx"
    subprocess.run([*common, "-arch=sm_90", "-ptx", "-o", str(ptx), str(source)], check=True, timeout=240)
    kernels = {part.partition("(")[0].strip(): part for part in ptx.read_text().split(".visible .entry ")[1:]}
    for name in ("kvtier_gather", "kvtier_scatter"):
        assert kernels[name].count("ld.global.cs.v2.u64") == 4  # all under way before the first is stored
        assert kernels[name].count("st.global.cs.v2.u64") == 4
    assert kernels["kvtier_sum"].count("st.global.cs") == 0


MEMORY = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*((?:LD|ST)[GL]?\.[\w.]*|(?:ATOM|RED)\w*)", re.M)


@pytest.mark.skipif(
    BUILD == "OFF" or (not BUILD and (shutil.which("cuobjdump") is None or not _core.kernel_image())),
    reason="needs a build by nvcc, and cuobjdump: `make test-cuda` brings both",
)
def test_the_machine_code_that_was_built_in_moves_16_bytes_at_a_time_and_four_loads_before_a_store(
    tmp_path: Path,
) -> None:
    image = tmp_path / "image.fatbin"
    image.write_bytes(_core.kernel_image())
    shown = subprocess.run(
        ["cuobjdump", "-sass", str(image)], capture_output=True, text=True, check=True, timeout=240
    ).stdout
    found = set()
    for part in re.split(r"(?m)^\s*arch = ", shown)[1:]:
        target, _, body = part.partition("\n")
        for text in body.split("Function : ")[1:]:
            name, memory = text.split()[0], MEMORY.findall(text)
            found.add((target, name))
            assert not [op for op in memory if op.startswith(("LDL", "STL", "ATOM", "RED"))], (target, name, memory)
            pages = [op[:2] for op in memory if ".EF.128" in op]  # what streams past the caches: the pages' bytes
            whole = {"kvtier_gather": 4 * ["LD"] + 4 * ["ST"], "kvtier_sum": 4 * ["LD"]}
            whole["kvtier_scatter"] = whole["kvtier_gather"]
            assert pages == whole.get(name, []), (target, name, memory)
            narrow = [op for op in memory if ".U8" in op or ".U16" in op]
            assert bool(narrow) == name.endswith("_bytes"), (target, name, memory)
    kinds = {f"kvtier_{way}{end}" for way in ("gather", "scatter", "sum") for end in ("", "_bytes")}
    assert found == {(target, kind) for target in ("sm_80", "sm_90", "sm_100") for kind in kinds}


@pytest.mark.skipif(
    not BUILD and importlib.util.find_spec("cupy") is None, reason="needs CuPy with NVRTC: `make test-cuda` brings them"
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_same_source_compiles_at_run_time(capability: tuple[int, int]) -> None:
    from kvtier.tiers.cuda import compile_kernels

    assert compile_kernels(capability).startswith(b"\x7fELF")


def test_the_source_is_always_there_and_the_image_where_nvcc_was() -> None:
    assert "kvtier_gather" in _core.kernel_source()
    assert _core.kernel_source() == (ROOT / "csrc" / "cuda" / "page_copy.cu").read_text()
    assert _core.kernel_header() == (ROOT / "csrc" / "cuda" / "page_args.hpp").read_text()
    image = "sm_80 sm_90 sm_100 compute_100"
    assert _core.cuda_status()["built_for"] in {"ON": (image,), "OFF": ("",), None: (image, "")}[BUILD]


def test_calibrating_copies_without_a_gpu_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtier.cli.main import main

    if _core.cuda_status()["devices"]:
        pytest.skip("there is a GPU")
    assert main(["calibrate-copies", "--profile", str(tmp_path / "paths.json")]) == 2
    assert "CUDA device 0: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_calibrating_copies_keeps_and_shows_paths_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.cli.main import main

    device = CudaDevice.emulated_device()
    monkeypatch.setattr(CudaDevice, "of", staticmethod(lambda ordinal: device))
    monkeypatch.setattr("kvtier.cli.calibrate_copies._on_device", lambda geometry, slots, _: geometry.allocate(slots))
    profile = tmp_path / "paths.json"
    wanted = ["--profile", str(profile), "--model", "llama-3-8b", "--size", "4MiB", "--rounds", "1"]
    assert main(["calibrate-copies", *wanted]) == 0
    (kept,) = copy_paths.load(profile)
    shown = capsys.readouterr().out
    for name in (*PATHS, *ENDS, "an emulated device", str(profile)):
        assert name in shown.replace("\n", ""), name
    assert set(kept.ends) == set(ENDS)
