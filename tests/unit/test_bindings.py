"""Between Python and the engine: what is pointed into lives, who waits lets others run, sizes are looked at first."""

from __future__ import annotations

import gc
import os
import weakref

import numpy as np
import pytest

from disk_kit import in_child
from kvtier import _core
from kvtier.content import Content
from kvtier.geometry import KVGeometry
from kvtier.tiers.device import DevicePool

GEOMETRY = KVGeometry.named("smollm2-135m", block_size=4)

# The interpreter stands still where a call waits and keeps the GIL; then the process is ended by a thread without it.
WATCHED = """
import faulthandler, os, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
import numpy as np
from kvtier import _core
"""


def test_arrays_live_as_long_as_whatever_copies_to_and_from_them() -> None:
    arrays = list(GEOMETRY.allocate(4))
    seen = [weakref.ref(array) for array in arrays]
    pool = DevicePool(GEOMETRY, arrays)
    mover = _core.Mover(pool.native, _core.HostArena(4, GEOMETRY.payload_bytes), None)
    del arrays, pool
    gc.collect()
    assert all(array() is not None for array in seen), "an array went that a mover still copies to"
    assert mover.close()
    del mover
    gc.collect()
    assert not any(array() is not None for array in seen)


@pytest.mark.parametrize("call", ["store.clear_record(0)", "store.write_record(1, identity, 5)"])
def test_whoever_waits_for_a_disk_that_hangs_lets_others_run(call: str, tmp_path) -> None:
    done = in_child(
        WATCHED
        + f"""
store = _core.DiskStore(sys.argv[1], 8, 3000, 64, bytes(32))
identity = np.zeros(_core.identity_bytes(64), np.uint8)
assert store.write_record(0, identity, 5) == 0
plan = _core.FaultPlan()
plan.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER, on=_core.FaultPlan.On.WRITE)
_core.use_faults(plan)
waiting = threading.Thread(target=lambda: {call})
waiting.start()
while not plan.fired:
    time.sleep(0.001)
plan.release()
waiting.join()
print("others ran")
""",
        tmp_path,
    )
    assert done.stdout == "others ran\n", done.stderr


def test_a_mover_that_nobody_closed_ends_and_lets_others_run_meanwhile(tmp_path) -> None:
    done = in_child(
        WATCHED
        + """
from pathlib import Path
from tests.unit.mover_rig import DISK, HOST, Rig, span
plan = _core.FaultPlan()
plan.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER)
rig = Rig(Path(sys.argv[1]), faults=plan, close_limit_s=1000.0)
rig.submit((HOST, DISK), [span(4, 1), span(0, 1)], [9])
while not plan.fired:
    time.sleep(0.001)
movers = [rig.mover]
del rig.mover
going = threading.Thread(target=movers.clear)
going.start()
going.join(0.2)
assert going.is_alive()
plan.release()
going.join()
print("others ran")
""",
        tmp_path,
    )
    assert done.stdout == "others ran\n", done.stderr


@pytest.mark.parametrize("call", ["CudaDevice.open(0)", "cuda_status()", "cuda_capability(0)"])
def test_whoever_waits_for_the_driver_to_start_lets_others_run(
    call: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's library is a pipe here: who opens it waits for somebody to write."""
    os.mkfifo(tmp_path / "libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = in_child(
        WATCHED
        + f"""
def ask():
    try:
        _core.{call}
    except _core.CudaError:
        pass

asking = threading.Thread(target=ask)
asking.start()
while True:
    try:
        os.close(os.open(sys.argv[1] + "/libcuda.so.1", os.O_WRONLY | os.O_NONBLOCK))
        break
    except OSError:
        time.sleep(0.001)
asking.join()
print("others ran")
""",
        tmp_path,
    )
    assert done.stdout == "others ran\n", done.stderr


@pytest.mark.parametrize(
    "call",
    ["device.make_stream()", "device.owns(1)", "_core.Mover(pool, arena, None, cuda=copies)",
     "_core.measure_path(copies, pool, arena, True, slots, slots, 1)", "device.read_page(pool, 0, page)"],
)  # fmt: skip
def test_whoever_waits_for_a_device_lets_others_run(call: str) -> None:
    done = in_child(
        WATCHED
        + f"""
device = _core.CudaDevice.emulated()
memory, page, slots = np.zeros(8192, np.uint8), np.zeros(4096, np.uint8), np.zeros(1, np.uint32)
pool, arena = _core.DevicePool([(memory.ctypes.data, 4096, 4096)], 2, memory), _core.HostArena(2, 4096)
pinned = _core.PinnedArena(device, arena)
pinned.wait()
copies = _core.CudaCopies(device, pinned)
device.stall()
asking = threading.Thread(target=lambda: {call})
asking.start()
while not device.stalled:
    time.sleep(0.001)
device.stall(False)
asking.join()
print("others ran")
"""
    )
    assert done.stdout == "others ran\n", done.stderr


def test_an_arena_that_goes_while_it_is_pinned_lets_others_run() -> None:
    done = in_child(
        WATCHED
        + """
device, arena = _core.CudaDevice.emulated(), _core.HostArena(2, 4096)
device.stall()
pinned = [_core.PinnedArena(device, arena)]
while not device.stalled:
    time.sleep(0.001)
going = threading.Thread(target=pinned.clear)
going.start()
going.join(0.2)
assert going.is_alive()
device.stall(False)
going.join()
print("others ran")
"""
    )
    assert done.stdout == "others ran\n", done.stderr


FORKED = """
import signal
alone, device, arena = _core.CudaDevice.emulated(), _core.CudaDevice.emulated(), _core.HostArena(2, 4096)
memory, page = np.zeros(8192, np.uint8), np.zeros(4096, np.uint8)
pool = _core.DevicePool([(memory.ctypes.data, 4096, 4096)], 2, memory)
pinned = _core.PinnedArena(device, arena)
pinned.wait()
mover = _core.Mover(pool, arena, None, cuda=_core.CudaCopies(device, pinned))
device.stall()
late = _core.PinnedArena(device, arena)
while not device.stalled:
    time.sleep(0.001)

def says_fork(call):
    try:
        call()
    except (_core.CudaError, RuntimeError) as error:
        return "fork()" in str(error)
    return False

child = os.fork()
if not child:
    signal.alarm(20)  # whoever hangs is ended
    good = ACTION
    os._exit(0 if good else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
device.stall(False)
late.wait()
assert device.owns(0) == ""
print("child", status)
"""


ACTIONS = {
    "lets all go": "all(globals().pop(name) for name in ('mover', 'late', 'pinned', 'device', 'alone'))",
    "makes a stream": "says_fork(device.make_stream)",
    "waits for pinning": "says_fork(late.wait)",
    "reads a page": "says_fork(lambda: device.read_page(pool, 0, page))",
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_a_forked_child_lets_a_device_go_at_once_and_is_refused_its_use(action: str) -> None:
    """The threads that play the device and pin the arena are the parent's, and one of them holds a lock."""
    done = in_child(WATCHED + FORKED.replace("ACTION", action))
    assert done.stdout == "child 0\n", (done.stdout, done.stderr)


def test_what_is_measured_is_what_was_found_right() -> None:
    """Others run during a measurement, and may write to the arrays that it was given."""
    done = in_child(
        WATCHED
        + """
device = _core.CudaDevice.emulated()
memory, slots, pages = np.zeros(8192, np.uint8), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
pool, arena = _core.DevicePool([(memory.ctypes.data, 4096, 4096)], 2, memory), _core.HostArena(2, 4096)
pinned = _core.PinnedArena(device, arena)
pinned.wait()
copies = _core.CudaCopies(device, pinned)
device.stall()
asking = threading.Thread(target=lambda: _core.measure_path(copies, pool, arena, True, slots, pages, 1))
asking.start()
while not device.stalled:
    time.sleep(0.001)
slots[0] = pages[0] = 2**30
device.stall(False)
asking.join()
print(device.races())
"""
    )
    assert done.stdout == "[]\n", (done.returncode, done.stderr)


def test_pools_and_arenas_that_do_not_belong_together_are_refused_by_name() -> None:
    device = _core.CudaDevice.emulated()
    memory, slots = np.zeros(8192, np.uint8), np.zeros(1, np.uint32)
    pool = _core.DevicePool([(memory.ctypes.data, 4096, 4096)], 2, memory)
    arena, other, small = _core.HostArena(2, 4096), _core.HostArena(2, 4096), _core.HostArena(2, 512)
    of_arena, of_small = (_core.CudaCopies(device, _core.PinnedArena(device, each)) for each in (arena, small))
    with pytest.raises(ValueError, match="device pages have 4096 bytes, host pages 512: they must be equal"):
        _core.measure_path(of_small, pool, small, True, slots, slots, 1)
    with pytest.raises(ValueError, match="pinned: another arena's memory"):
        _core.measure_path(of_arena, pool, other, True, slots, slots, 1)
    with pytest.raises(ValueError, match="pinned: another arena's memory"):
        _core.Mover(pool, other, None, cuda=of_arena)
    for share in (float("nan"), 1e30, 0.0):
        copies = _core.CudaCopies(device, _core.PinnedArena(device, arena), processor_share=share)
        with pytest.raises(ValueError, match="processor_share"):
            _core.Mover(pool, arena, None, cuda=copies)


def test_two_threads_may_make_the_first_array_of_a_kind_at_once() -> None:
    """Where the first one's look for numpy lets the second have its turn."""
    done = in_child(
        WATCHED
        + """
import builtins
content, plain, first = _core.Content(), builtins.__import__, threading.Event()

def slow(name, *args, **options):
    if name == "numpy" and not first.is_set():
        first.set()
        time.sleep(0.5)
    return plain(name, *args, **options)

def labels():
    made.append(content.labels(0, 0, 4).shape)

made = []
builtins.__import__ = slow
one = threading.Thread(target=labels)
one.start()
first.wait()
labels()
one.join()
print(made)
"""
    )
    assert done.stdout == "[(0, 12), (0, 12)]\n", done.stderr


@pytest.mark.parametrize(("first", "last"), [(0, 3), (0, 1 << 40), (1 << 61, 1 << 62), (2, 1), (0, (1 << 64) - 1)])
def test_labels_of_blocks_that_are_not_there_are_refused_before_memory_is_taken(first: int, last: int) -> None:
    content = Content([7] * 11)
    with pytest.raises(ValueError, match=r"blocks: \[.* of 4 tokens given; 11 tokens are known"):
        content.labels(first, last, 4)
    assert content.labels(1, 2, 4).shape == (1, 12)


def test_no_array_is_copied_where_its_own_memory_is_meant() -> None:
    """A copy would be filled in its place, or be gone before an operation on it has ended."""
    memory, wide, words = np.zeros(64, np.uint8), np.zeros(128, np.uint8), np.zeros(64, np.uint16)
    pool = _core.DevicePool([(memory.ctypes.data, 64, 64)], 1)
    engine = _core.FileEngine("threads")
    for array in (wide[::2], words):
        for call in (
            lambda a: pool.gather(0, a),
            lambda a: pool.scatter(0, a),
            lambda a: engine.submit(1, 0, False, 0, a),
            lambda a: _core.FileEngine("threads", registered=a),
        ):
            with pytest.raises(TypeError, match="incompatible"):
                call(array)
    assert engine.in_flight == 0


def test_a_list_for_which_there_is_no_memory_is_refused_and_the_process_goes_on() -> None:
    done = in_child(
        WATCHED
        + """
import re, resource
nodes = [0] * 4_000_000
catalog = _core.Catalog([(0, 8, "lru", True), (1, 8, "lru", True)], 4 * 4 + 32, 100)
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    catalog.lacking(nodes, _core.Tier.DEVICE, _core.Tier.HOST)
except MemoryError:
    print("refused")
"""
    )
    assert done.stdout == "refused\n", done.stderr
