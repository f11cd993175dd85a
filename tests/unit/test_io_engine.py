"""The file engines: what goes in comes out, faults are reported as they are, and no wait is without an end."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from disk_kit import in_child
from kvtier import _core

KINDS = ("io_uring", "threads")
BLOCK = 4096


def uring_works() -> bool:
    try:
        _core.FileEngine("io_uring")
    except ValueError:
        return False
    return True


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and not uring_works():
        pytest.skip("io_uring is refused on this machine")
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def drain(engine: _core.FileEngine, count: int) -> dict[int, int]:
    found: dict[int, int] = {}
    limit = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < limit, f"{count - len(found)} operations never ended"
        found |= dict(engine.reap(16, 1.0))
    return found


def test_the_raw_loop_gives_its_buffer_back_when_nothing_uses_it_any_more() -> None:
    """Of two reads of a pipe one comes short, which is a failure; the other still waits."""
    if not uring_works():
        pytest.skip("io_uring is refused on this machine")
    out, into = os.pipe()
    failed: list[OSError] = []

    def loop() -> None:
        try:
            _core.raw_loop(out, False, np.zeros(2 * BLOCK, np.uint8), BLOCK, np.zeros(2, np.uint32), 2)
        except OSError as error:
            failed.append(error)

    reads = threading.Thread(target=loop)
    reads.start()
    os.write(into, b"short")
    reads.join(0.5)
    assert reads.is_alive()
    os.close(into)  # the other one ends with nothing
    reads.join()
    os.close(out)
    assert [error.errno for error in failed] == [errno.EIO]


@pytest.mark.parametrize("timeout", [1e300, float("inf")])
def test_a_wait_of_any_length_is_one(timeout: float) -> None:
    if not uring_works():
        pytest.skip("io_uring is refused on this machine")
    out, into = os.pipe()
    engine, page = _core.FileEngine("io_uring"), np.zeros(BLOCK, np.uint8)
    engine.submit(7, out, False, 0, page)
    engine.flush()
    later = threading.Timer(0.2, os.write, (into, b"some"))
    later.start()
    assert engine.reap(1, float("nan")) == []
    assert engine.reap(1, timeout) == [(7, 4)]
    later.join()
    os.close(out)
    os.close(into)


def blocks(count: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK), np.uint8)


@pytest.mark.parametrize("registered", [False, True])
def test_reads_back_what_it_wrote(kind: str, registered: bool, file: int, seed: int) -> None:
    out = blocks(64, seed)
    back = np.zeros_like(out)
    memory = np.zeros(out.size, np.uint8)
    engine = _core.FileEngine(kind, depth=16, registered=memory if registered else None)
    order = np.random.default_rng(seed).permutation(len(out))
    for write in (True, False):
        results: dict[int, int] = {}
        for index in map(int, order):
            place = memory[index * BLOCK : (index + 1) * BLOCK]
            if write:
                place[:] = out[index]
            while not engine.submit(index, file, write, index * BLOCK, place):
                results |= dict(engine.reap(16, 1.0))
        results |= drain(engine, len(out) - len(results))
        assert results == dict.fromkeys(range(len(out)), BLOCK)
        assert engine.in_flight == 0
        if write:
            memory[:] = 0
    back[:] = memory.reshape(back.shape)
    assert (back == out).all()
    assert np.frombuffer(os.pread(file, out.size, 0), np.uint8).tobytes() == out.tobytes()


def test_refuses_more_than_its_depth_and_goes_on_after_a_reap(kind: str, file: int) -> None:
    engine = _core.FileEngine(kind, depth=4)
    data = blocks(5, 1)
    assert [engine.submit(i, file, True, i * BLOCK, data[i]) for i in range(5)] == [True] * 4 + [False]
    assert engine.in_flight == 4
    assert drain(engine, 4) == dict.fromkeys(range(4), BLOCK)
    assert engine.submit(4, file, True, 4 * BLOCK, data[4])
    assert drain(engine, 1) == {4: BLOCK}


def test_reports_a_short_read_as_it_is(kind: str, file: int) -> None:
    os.pwrite(file, b"x" * 1000, 0)
    engine = _core.FileEngine(kind)
    buffer = np.zeros(BLOCK, np.uint8)
    engine.submit(7, file, False, 0, buffer)
    engine.submit(8, file, False, 1 << 40, buffer.copy())
    assert drain(engine, 2) == {7: 1000, 8: 0}
    assert bytes(buffer[:1001]) == b"x" * 1000 + b"\0"


def test_reports_the_errno_of_each_operation(kind: str, file: int, tmp_path: Path) -> None:
    engine = _core.FileEngine(kind)
    buffer = np.zeros(BLOCK, np.uint8)
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        engine.submit(2**64 - 1, read_only, True, 0, buffer)
        engine.submit(0, folder, False, 0, buffer)
        engine.submit(5, 1_000_000, False, 0, buffer)
        engine.submit(6, file, True, 0, buffer)
        expected = {2**64 - 1: -errno.EBADF, 0: -errno.EISDIR, 5: -errno.EBADF, 6: BLOCK}
        assert drain(engine, 4) == expected
    finally:
        os.close(read_only)
        os.close(folder)


def test_reap_returns_at_once_when_nothing_is_in_flight(kind: str) -> None:
    engine = _core.FileEngine(kind)
    start = time.monotonic()
    assert engine.reap(8, 300.0) == []
    assert time.monotonic() - start < 200


def stuck_engine() -> tuple[_core.FileEngine, npt.NDArray[np.uint8], tuple[int, int]]:
    if not uring_works():
        pytest.skip("io_uring is refused on this machine")
    engine = _core.FileEngine("io_uring")
    pipe = os.pipe()
    buffer = np.zeros(8, np.uint8)
    assert engine.submit(1, pipe[0], False, 0, buffer)  # nobody writes: it hangs
    return engine, buffer, pipe


def test_a_hung_operation_does_not_hold_the_thread_and_may_end_late() -> None:
    engine, buffer, pipe = stuck_engine()
    assert engine.reap(8, 0.05) == []
    assert engine.in_flight == 1
    os.write(pipe[1], b"late....")
    assert drain(engine, 1) == {1: 8}
    assert bytes(buffer) == b"late...."
    os.close(pipe[0])
    os.close(pipe[1])


def test_wake_ends_a_wait_from_another_thread() -> None:
    engine, _, pipe = stuck_engine()
    for _ in range(3):  # it works more than once
        timer = threading.Timer(0.02, engine.wake)
        timer.start()
        start = time.monotonic()
        assert engine.reap(8, 300.0) == []
        assert time.monotonic() - start < 200
        timer.join()
    engine.wake()  # before the wait: it holds for the next one
    assert engine.reap(8, 300.0) == []
    os.write(pipe[1], b"12345678")
    assert drain(engine, 1) == {1: 8}
    os.close(pipe[0])
    os.close(pipe[1])


def test_wake_ends_a_wait_for_a_thread_too(file: int) -> None:
    plan = _core.FaultPlan()
    plan.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER)
    engine = _core.FileEngine("threads", faults=plan)
    engine.submit(1, file, True, 0, blocks(1, 1)[0])
    threading.Timer(0.02, engine.wake).start()
    assert engine.reap(8, 300.0) == []
    plan.release()
    assert drain(engine, 1) == {1: BLOCK}


def test_a_buffer_across_two_registered_pieces_is_moved_whole(file: int) -> None:
    if not uring_works():
        pytest.skip("io_uring is refused on this machine")
    memory = np.zeros((1 << 30) + (1 << 20), np.uint8)  # one piece is at most 1 GiB
    engine = _core.FileEngine("io_uring", registered=memory)
    if "unregistered" in engine.name:
        pytest.skip("this machine does not let us register 1 GiB")
    across = memory[(1 << 30) - 100 : (1 << 30) + 5000]
    behind = memory[(1 << 30) + 8192 : (1 << 30) + 16384]
    across[:] = np.arange(across.size) % 251
    engine.submit(1, file, True, 0, across)
    drain(engine, 1)
    engine.submit(2, file, False, 0, behind[: across.size])
    assert drain(engine, 1) == {2: across.size}
    assert (behind[: across.size] == across).all()


UNPRIVILEGED = """
import os, resource, sys
import numpy as np
from kvtier import _core
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
memory = np.zeros(8 << 20, np.uint8)
engine = _core.FileEngine("io_uring", registered=memory)
fd = int(sys.argv[1])
page = memory[4096:8192]
page[:] = 7
assert engine.submit(1, fd, True, 0, page)
assert engine.reap(1, 30.0) == [(1, 4096)]
print(engine.name)
"""


def test_works_unregistered_where_memory_may_not_be_locked(file: int) -> None:
    if not uring_works():
        pytest.skip("io_uring is refused on this machine")
    child = in_child(UNPRIVILEGED, file, pass_fds=[file])
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "io_uring, unregistered buffers"
    assert os.pread(file, 4096, 0) == b"\7" * 4096


# A seccomp filter, as containers have it: io_uring_setup (425) gives EPERM, everything else is allowed.
REFUSED = """
import ctypes, errno, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(filters))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
from kvtier import _core
assert _core.FileEngine("auto").name.startswith("threads")
try:
    _core.FileEngine("io_uring")
except ValueError as error:
    print(error)
print(_core.probe_io(sys.argv[1]).why)
"""


def test_falls_back_to_threads_where_io_uring_is_forbidden_and_says_why(tmp_path: Path) -> None:
    child = in_child(REFUSED, tmp_path)
    assert child.returncode == 0, child.stderr
    refused, why = child.stdout.splitlines()
    assert "io_uring is refused here (Operation not permitted)" in refused
    assert why.endswith("through a pool of threads, because io_uring is refused here (Operation not permitted)")


class TestFaultyEngine:
    """The tool that other tests break things with must itself do what it says."""

    def engine(self, kind: str, *faults: tuple[object, ...]) -> tuple[_core.FileEngine, _core.FaultPlan]:
        plan = _core.FaultPlan()
        for fault in faults:
            plan.add(*fault)  # type: ignore[arg-type]
        return _core.FileEngine(kind, faults=plan), plan

    def test_fails_only_the_nth_operation_of_its_direction(self, kind: str, file: int) -> None:
        on = _core.FaultPlan.On.WRITE
        engine, plan = self.engine(kind, (_core.FaultPlan.Kind.ERROR, 2, errno.EIO, 1, on))
        data = blocks(1, 1)[0]
        for tag, write in enumerate((True, False, True, False, True)):
            engine.submit(tag, file, write, 0, data)
            drained = drain(engine, 1)
            assert drained == {tag: -errno.EIO if tag == 2 else BLOCK}
        assert (plan.operations, plan.fired) == (5, 1)

    def test_a_short_transfer_moves_fewer_bytes(self, kind: str, file: int) -> None:
        engine, _ = self.engine(kind, (_core.FaultPlan.Kind.SHORT, 1, 96))
        engine.submit(1, file, True, 0, blocks(1, 1)[0])
        assert drain(engine, 1) == {1: BLOCK - 96}
        assert os.fstat(file).st_size == BLOCK - 96

    def test_a_flip_changes_one_bit_of_what_was_read(self, kind: str, file: int) -> None:
        data = blocks(1, 1)[0]
        os.pwrite(file, data, 0)
        engine, _ = self.engine(kind, (_core.FaultPlan.Kind.FLIP, 1, 8 * 100 + 3))
        back = np.zeros_like(data)
        engine.submit(1, file, False, 0, back)
        assert drain(engine, 1) == {1: BLOCK}
        assert back[100] ^ data[100] == 8
        back[100] = data[100]
        assert (back == data).all()

    def test_a_flipped_write_leaves_the_buffer_as_it_was(self, kind: str, file: int) -> None:
        data = blocks(1, 1)[0]
        kept = data.copy()
        engine, _ = self.engine(kind, (_core.FaultPlan.Kind.FLIP, 1, 0))
        engine.submit(1, file, True, 0, data)
        drain(engine, 1)
        assert (data == kept).all()
        assert os.pread(file, 2, 0) == bytes([kept[0] ^ 1, kept[1]])

    def test_a_delayed_operation_touches_its_buffer_only_after_release(self, kind: str, file: int) -> None:
        os.pwrite(file, b"\7" * BLOCK, 0)
        engine, plan = self.engine(kind, (_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER))
        held, free = np.zeros(BLOCK, np.uint8), np.zeros(BLOCK, np.uint8)
        engine.submit(1, file, False, 0, held)
        engine.submit(2, file, False, 0, free)
        assert drain(engine, 1) == {2: BLOCK}
        assert engine.reap(8, 0.01) == []
        assert (engine.in_flight, held.any()) == (1, False)
        plan.release()
        assert drain(engine, 1) == {1: BLOCK}
        assert (held == 7).all()
