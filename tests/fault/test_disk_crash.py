"""The process dies at every point of a store's life: what a reopened store serves is what was written whole."""

import json
from pathlib import Path

from disk_kit import disk_folder, in_child

# Runs in a process of its own, which forks one victim per crash point and looks at what it left.
COMMON = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from disk_kit import *
from kvtier import _core

folder = Path(sys.argv[1])

def bytes_of(store, slot):
    memory = np.zeros(2 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    aligned = memory[start : start + PAGE]
    assert os.preadv(store.native.fd, [aligned], store.native.offset(slot)) == PAGE
    return aligned.tobytes()

def check(store):
    "Every record names the page that its slot really holds, of the valid generation."
    found = held(store)
    for slot, name in found.items():
        number = int(np.frombuffer(name[108:112], "<u4")[0])
        generation = int(np.frombuffer(name[96:104], "<u8")[0])
        space = name[64:96]
        assert generation == store.generation(space), (slot, generation)
        assert name == identity(number, space, generation).tobytes()
        assert served(store, slot, number, space, generation)
        assert bytes_of(store, slot) == page(number).tobytes(), (slot, number)
    return found
"""

EVERY_POINT = (
    COMMON
    + """
def life(done):
    with make(folder, journal_entries=4) as store:
        for slot in range(4):
            put(store, slot, slot)
        put(store, 0, 100)
        store.clear([1])
        store.invalidate(SPACE_A)
        os.write(done, b"i")
        put(store, 2, 102, SPACE_A, 1)
        for _ in range(4):
            store.invalidate(SPACE_B)
    with make(folder, journal_entries=4) as store:
        put(store, 3, 103, SPACE_A, 1)
        os.write(done, b"e")

points = 0
for kind in (_core.FaultPlan.Kind.CRASH, _core.FaultPlan.Kind.TORN_CRASH):
    for n in range(1, 500):
        for path in folder.iterdir():
            path.unlink()
        reader, writer = os.pipe()
        victim = os.fork()
        if victim == 0:
            plan = _core.FaultPlan()
            plan.add(kind, n)
            _core.use_faults(plan)
            life(writer)
            os._exit(0)
        os.close(writer)
        status = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
        done = os.read(reader, 10)
        os.close(reader)
        assert status in (0, 137), status
        with make(folder, journal_entries=4) as store:
            found = check(store)
            if b"i" in done:  # an invalidation that returned holds
                assert store.generation(SPACE_A) >= 1
            if b"e" in done:
                assert set(found) == {2, 3}, found.keys()
        points += 1
        if status == 0:
            break
print(json.dumps(points))
"""
)

KILLED = (
    COMMON
    + """
random.seed(int(sys.argv[2]))
pages = 0
for point in range(50):
    reader, writer = os.pipe()
    victim = os.fork()
    if victim == 0:
        os.close(reader)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with make(folder) as store:
            number = 1000 * point
            while True:
                os.write(writer, b"w")  # the first time before any record, so that this moment is among the fifty too
                put(store, random.randrange(SLOTS), number, SPACE_A, store.generation(SPACE_A))
                number += 1
                if number % 40 == 0:
                    store.invalidate(SPACE_A)
    os.close(writer)
    seen = 0
    for _ in range(point % 5 * 3 + 1):
        seen += len(os.read(reader, 1))
    assert seen == point % 5 * 3 + 1, "the victim died by itself"
    time.sleep(random.uniform(0.0, 0.01))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    os.close(reader)
    with make(folder) as store:
        pages += len(check(store))
print(json.dumps(pages))
"""
)


def test_every_crash_point_leaves_only_whole_pages(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        child = in_child(EVERY_POINT, folder)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) > 60


def test_killed_at_fifty_moments_it_serves_only_what_was_written_whole(tmp_path: Path, seed: int) -> None:
    with disk_folder(tmp_path) as folder:
        child = in_child(KILLED, folder, seed)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) > 20
