"""The real control plane over a simulated data plane: whatever happens, a request sees its own bytes only.

``pytest tests/property/test_stories.py --sim-seed N`` tells the story of one seed; see docs/reliability.md.
"""

import subprocess
import sys
from collections import Counter

import pytest

from kvtier.catalog import Catalog, Tier
from kvtier.sim.draw import BrokenStoryError, draw_story
from kvtier.sim.events import EventPlane
from kvtier.sim.plane import ViolationError
from kvtier.sim.shrink import complaint, shrink
from kvtier.sim.simulation import tell
from kvtier.sim.story import Setup, Story

SEEDS = range(16)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "story_seed" in metafunc.fixturenames:
        only = metafunc.config.getoption("--sim-seed")
        metafunc.parametrize("story_seed", SEEDS if only is None else [only])


def told(config: pytest.Config, seed: int, steps: int, **options: bool) -> None:
    """Tells a drawn story; one that goes wrong fails with its seed and the shortest story that does the same."""
    try:
        draw_story(seed, steps, **options)
    except BrokenStoryError as error:
        short = shrink(error.story, most_runs=config.getoption("--sim-shrink"))
        pytest.fail(
            f"{error}\nreplay: pytest {__file__} --sim-seed {seed} --sim-steps {steps}\n"
            f"{len(error.story.steps)} steps shrunk to {len(short.steps)}:\n{short.to_text()}",
            pytrace=False,
        )


def broken_story(seed: int) -> Story | None:
    try:
        draw_story(seed, 1000)
    except BrokenStoryError as error:
        return error.story
    return None


def test_every_story_keeps_its_promises(story_seed: int, request: pytest.FixtureRequest) -> None:
    told(request.config, story_seed, request.config.getoption("--sim-steps"))


@pytest.mark.parametrize("seed", range(4))
def test_without_faults_too(seed: int, request: pytest.FixtureRequest) -> None:
    told(request.config, seed, 1000, faults=False)


# What the soak counts by the thousand has to come up in a few stories too; rarer kinds are left to the soak.
KINDS = [
    *("fault: refused", "fault: repeated", "fault: lost", "fault: late", "fault: reordered", "fault: lane delayed"),
    *("fault: device full", "fault: queue full", "fault: crash", "fault: write_error"),
    *("aborted while queued", "aborted in mid-load", "aborted in mid-store", "aborted running", "aborted preempted"),
    *("preempted matched", "preempted loading", "preempted running", "reset", "invalidated"),
    *("shorter than promised", "tokens loaded", "pages evicted by name"),
]


def test_faults_and_aborts_of_every_usual_kind_are_told() -> None:
    counts = Counter[str]()
    for seed in range(101, 109):
        counts += draw_story(seed, 1500, audit_every=8)[1].counts
    missing = [name for name in KINDS if not counts[name]]
    assert not missing, missing


DIGEST = "from kvtier.sim.draw import draw_story; print(draw_story({seed}, 800)[1].digest)"


def test_equal_seeds_give_equal_decisions_in_every_process() -> None:
    story, simulation = draw_story(7, 800)
    assert draw_story(7, 800)[1].digest == simulation.digest
    assert draw_story(8, 800)[1].digest != simulation.digest
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", DIGEST.format(seed=7)]
        other = subprocess.run(
            command, env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True
        )
        assert other.stdout.strip() == simulation.digest, other.stderr
    again = Story.from_text(story.to_text())
    assert tell(again).digest == simulation.digest, "a story is all that its run depends on"


def test_any_part_of_a_story_can_be_told() -> None:
    story, _ = draw_story(3, 400)
    for keep in (2, 3, 5):
        tell(Story(story.setup, story.steps[::keep]))


def test_a_story_that_goes_wrong_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Catalog.settle

    def believes(self: Catalog, ticket: int, status) -> bool:  # type: ignore[no-untyped-def]
        status = status.copy()
        status[status > 1] = 1  # that whatever ended went well
        return settle(self, ticket, status)

    monkeypatch.setattr(Catalog, "settle", believes)
    story = next(filter(None, map(broken_story, range(20))))
    short = shrink(story)
    assert complaint(short) == complaint(story)
    assert len(short.steps) < 20, short.to_text()
    monkeypatch.undo()
    assert complaint(short) is None


OVERDUE = """
{"setup": {"device": 10, "host": 3, "disk": 45, "load_policy": "always", "high": 0.6, "lease_seconds": 30.0,
 "load_seconds": 0.02, "queue_pages": 24, "spare_nodes": 20, "spaces": 2, "requests": 5}, "end": "stop"}
["arrive", 1, 3, 13, [1], 0]
["arrive", 2, 2, 10, [1], 0]
["start", 2]
["start", 1]
["compute", 2, 64]
["compute", 1, 64]
["flush", 0.5]
["crash", 1]
["arrive", 25, 3, 13, [2], 0]
["start", 25]
["advance", 12, 11, 0]
["advance", 2, 3, 0]
["lose", 2]
["flush", 0.5]
"""


def test_an_overdue_load_keeps_its_slots_until_the_data_plane_has_said_its_last_word() -> None:
    head, steps = OVERDUE.strip().split("}\n", 1)
    counts = tell(Story.from_text(head.replace("\n", "") + "}\n" + steps)).counts
    assert counts["fault: lost"] == 1
    assert counts["tokens loaded"] == 0


def test_a_control_plane_that_spins_is_found_out() -> None:
    plane = EventPlane({Tier.DEVICE: 1})
    waits = range(200)
    with pytest.raises(ViolationError, match="spins"):
        all(plane.wait(0.0) is False for _ in waits)


def test_a_step_that_fits_nowhere_does_nothing() -> None:
    story = Story(Setup(), [("free", 1), ("resume", 1), ("advance", 0, 0, 0), ("repeat", 3), ("compute", 4, 4)])
    assert tell(story).counts["steps"] == 0
