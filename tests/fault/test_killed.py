"""A process that serves is killed, at a random moment or in place of an operation: the next one finds only what is
right, and goes on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.disk_kit import disk_folder, in_child

# A process of its own, without threads, which forks one victim after the other on the same store. A victim first looks
# at what the one before left, and then serves until it is killed; it tells what it does through a pipe.
VICTIMS = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
from kvtier import _core
from tests.fault_kit import Cache, Kind, Surroundings, Tally, prompt

folder, seed, points = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
FAMILIES = range(16)
LONGEST = 5

def say(told, word):
    os.write(told, word + b" ")

def live(told, rng, epochs, crash_at):
    plan = None
    if crash_at:
        plan = _core.FaultPlan()
        plan.add(rng.choice((Kind.CRASH, Kind.TORN_CRASH)), crash_at)
        _core.use_faults(plan)
    tally = Tally()
    cache = Cache(folder, tally, epochs=epochs)
    cache.check()
    say(told, b"adopted:%d" % cache.manager.adopted)
    for family in FAMILIES:
        cache.serve(prompt(family, LONGEST))
    cache.check()
    say(told, b"served:%d" % tally["pages served"])
    for _ in range(100_000):
        if rng.random() < 0.02:
            say(told, b"begin")
            cache.reset()
            say(told, b"reset")
        cache.serve(prompt(rng.choice(FAMILIES), rng.randint(1, LONGEST)))
        say(told, b"step")

def victim(told, crash_at, epochs):
    code = 3
    try:
        live(told, random.Random(rng.random()), set(epochs), crash_at)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

epochs, tally, before = {0}, Tally(), Surroundings.now()
for point in range(points):
    reader, writer = os.pipe()
    crash_at = rng.randint(1, 300) if point % 2 else 0
    process = os.fork()
    if process == 0:
        os.close(reader)
        victim(writer, crash_at, epochs)
    os.close(writer)
    steps, told, tail = rng.randint(1, 6), [], b""
    killed = False
    while piece := os.read(reader, 4096):
        tail += piece
        *words, tail = tail.split(b" ")
        told += words
        if not crash_at and not killed and told.count(b"step") >= steps:
            time.sleep(rng.uniform(0.0, 0.01))
            os.kill(process, signal.SIGKILL)
            killed = True
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status == (137 if crash_at else -signal.SIGKILL), f"point {point}: the victim ended by itself, {status}"
    for word in told:
        if word == b"begin":
            epochs = epochs | {max(epochs) + 1}
        elif word == b"reset":
            epochs = {max(epochs)}
        elif b":" in word:
            name, number = word.split(b":")
            tally[name.decode()] += int(number)
    tally["killed" if killed else "crashed"] += 1
    left = {path.name for path in folder.iterdir()}
    assert left <= {"slab", "table", "generations", "lock", "generations.new", "table.new"}, left
    leaked = Surroundings.leaks(before)
    assert not leaked, leaked
print(json.dumps(tally))
"""


def kill(tmp_path: Path, seed: int, points: int, timeout: float = 280) -> dict[str, int]:
    with disk_folder(tmp_path) as folder:
        child = in_child(VICTIMS, folder, seed, points, timeout=timeout)
    assert child.returncode == 0, child.stderr
    tally: dict[str, int] = json.loads(child.stdout)
    return tally


def test_a_serving_process_that_is_killed_leaves_only_right_pages(tmp_path: Path, seed: int) -> None:
    tally = kill(tmp_path, seed, 20)
    print(tally)
    assert tally["killed"] == tally["crashed"] == 10
    assert tally["adopted"] > 50
    assert tally["served"] > 50
