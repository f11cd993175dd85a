"""What is learnt from completions and prefills, and how soon: on synthetic traces, with no clock but the trace's."""

import math
import random

import numpy as np
import pytest

from kvtier._core import Traffic
from kvtier.catalog import Catalog, Tier, TierSpec
from kvtier.costmodel import CostModel
from kvtier.fit import Fit
from kvtier.messages import Completion, HopReport, Priority

PAGE = 1 << 20
STAGE = (Tier.DISK, Tier.HOST)
LOAD = (Tier.DISK, Tier.HOST, Tier.DEVICE)


class Drive:
    """A lane with a real speed, which reports to a model; it serves one transfer after another."""

    def __init__(self, model: CostModel, rate: float, fixed: float = 1e-4, noise: random.Random | None = None):
        self.model, self.rate, self.fixed, self.noise = model, rate, fixed, noise
        self.now = 100.0
        self.free = 0.0
        self.tickets = 0

    def begin(self, blocks: int, priority: Priority = Priority.DEMAND) -> tuple[int, float, float, int]:
        self.tickets += 1
        self.model.submitted(self.tickets, STAGE, blocks, priority, self.now)
        idle = self.free <= self.now
        started = self.now if idle else self.free - self.fixed  # the lane takes a page before the last one is back
        seconds = (self.fixed if idle else 0.0) + blocks * PAGE / self.rate
        if self.noise is not None:
            seconds *= self.noise.uniform(0.8, 1.25) * (40 if self.noise.random() < 0.04 else 1)
        self.free = max(self.free, self.now) + seconds
        return self.tickets, started, self.free, blocks

    def end(self, begun: tuple[int, float, float, int]) -> None:
        ticket, started, ended, blocks = begun
        hop = HopReport("stage", blocks * PAGE, 0.0, ended - started, started, ended, blocks * PAGE)
        self.now = max(self.now, ended)
        self.model.completed(Completion(ticket, True, np.ones((1, blocks), np.uint8), (hop,), started, ended))

    def move(self, blocks: int) -> None:
        self.end(self.begin(blocks))
        self.now += 0.01


def test_what_was_never_seen_is_said_to_be_unknown() -> None:
    model = CostModel(PAGE)
    assert model.load(LOAD, 4, 0.0) is None
    assert model.recompute(64, 0) is None
    assert model.lane_speed("stage") is None
    assert model.prefill_speed() is None
    assert model.load(LOAD, 0, 0.0) == model.recompute(0, 10) == 0.0  # nothing takes no time, known or not
    assert model.describe() == "nothing measured yet"
    Drive(model, 1e9).move(4)
    assert model.load(STAGE, 4, 200.0) is not None
    assert model.load(LOAD, 4, 200.0) is None, "one of two lanes has never been seen"


def test_a_lane_s_fixed_cost_and_rate_are_learnt_through_noise_and_stalls(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel(PAGE)
    drive = Drive(model, 2e9, 3e-4, rng)
    off = dict.fromkeys((1, 8, 128), 0)
    for number in range(400):
        drive.move(rng.choice([1, 2, 8, 32, 128]))
        for blocks in off:
            true = 3e-4 + blocks * PAGE / 2e9
            off[blocks] += number >= 300 and not true / 1.6 < model.load(STAGE, blocks, drive.now) < 1.6 * true
    assert max(off.values()) <= 33, f"seed {seed}: {off}"  # two of three that stalled are believed, for a while


def test_one_size_alone_is_read_as_a_rate() -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 1e9, 0.0)
    for _ in range(5):
        drive.move(4)
    assert model.load(STAGE, 400, drive.now) == pytest.approx(400 * PAGE / 1e9, rel=0.1)


def test_transfers_that_overlap_count_once() -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 1e9)
    for _ in range(10):
        for begun in [drive.begin(8) for _ in range(6)]:
            drive.end(begun)
        drive.now += 0.01
    assert model.lane_speed("stage")[1] == pytest.approx(1e9, rel=0.05)


def test_a_stalled_operation_changes_little_and_a_changed_drive_is_believed_the_second_time() -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 2e9)
    for blocks in [1, 4, 16, 64] * 5:
        drive.move(blocks)
    usual = model.load(STAGE, 16, drive.now)
    drive.rate = 1e7
    drive.move(16)
    assert model.load(STAGE, 16, drive.now) < 1.6 * usual, "one stall was believed"
    drive.move(16)
    now = model.load(STAGE, 16, drive.now)
    assert now == pytest.approx(16 * PAGE / 1e7, rel=0.1), "it takes something else now"
    drive.rate = 2e9
    drive.move(1)
    drive.move(1)
    assert model.load(STAGE, 16, drive.now) == pytest.approx(usual, rel=0.3)


def test_what_it_took_long_ago_is_forgotten() -> None:
    """Where each time is too near to the one before to be a surprise."""
    model = CostModel(PAGE)
    drive = Drive(model, 2e9)
    for _ in range(400):
        drive.move(16)
    drive.rate = 1.5e9
    for _ in range(100):
        drive.move(16)
    now = model.load(STAGE, 16, drive.now)
    assert now == pytest.approx(16 * PAGE / 1.5e9, rel=0.05), "what it took long ago still counts"


@pytest.mark.parametrize("rate", [7e7, 7e8])
def test_a_drive_whose_rate_has_changed_is_not_taken_for_one_that_begins_slowly(rate: float) -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 4e9, 3e-3)

    def loads(count: int) -> None:
        for _ in range(count):
            for begun in [drive.begin(256) for _ in range(8)]:
                drive.end(begun)
            drive.now += 1.0

    loads(4)
    drive.rate = rate
    loads(1)
    assert model.load(STAGE, 2048, drive.now) == pytest.approx(3e-3 + 2048 * PAGE / rate, rel=0.15)
    for _ in range(2):  # as a probe asks: one for what it takes to begin, one for the rate
        for begun in [drive.begin(8) for _ in range(2)]:
            drive.end(begun)
        drive.now += 1.0
    for blocks in (8, 256, 2048):
        true = 3e-3 + blocks * PAGE / rate
        assert model.load(STAGE, blocks, drive.now) == pytest.approx(true, rel=0.4)


def test_a_hop_that_waits_for_another_is_not_taken_for_slow() -> None:
    model = CostModel(PAGE)
    status = np.ones((2, 8), np.uint8)
    for number in range(10):
        began = 10.0 * number
        stage = HopReport("stage", 8 * PAGE, 0.0, 1.0, began, began + 1.0, 8 * PAGE)
        onboard = HopReport("onboard", 8 * PAGE, 0.0, 0.001, began + 0.1, began + 1.001, 8 * PAGE)
        model.completed(Completion(number + 1, True, status, (stage, onboard), began, began + 1.001))
    assert model.load((Tier.HOST, Tier.DEVICE), 8, 200.0) == pytest.approx(0.001, rel=0.1)
    assert model.load(LOAD, 8, 200.0) == pytest.approx(1.0, rel=0.1)


def test_what_is_queued_is_waited_for_by_priority() -> None:
    model = CostModel(PAGE, bytes_in_flight=2 * PAGE)
    drive = Drive(model, 1e9)
    for _ in range(4):
        drive.move(8)
    drive.now = 500.0
    alone = model.load(STAGE, 8, drive.now)
    assert model.queue_wait("stage", drive.now) == 0.0
    demand = drive.begin(100)
    wait = model.queue_wait("stage", drive.now)
    assert wait == pytest.approx(100 * PAGE / 1e9, rel=0.05)
    assert model.load(STAGE, 8, drive.now) == pytest.approx(wait + alone, rel=0.05)
    assert model.queue_wait("stage", drive.now + wait / 2) == pytest.approx(wait / 2, rel=0.05)
    drive.end(demand)
    background = drive.begin(100, Priority.BACKGROUND)
    assert model.queue_wait("stage", drive.now) == pytest.approx(2 * PAGE / 1e9, rel=0.05)
    model.promoted(background[0], Priority.DEMAND)
    assert model.queue_wait("stage", drive.now) == pytest.approx(100 * PAGE / 1e9, rel=0.05)
    drive.end(background)
    assert model.queue_wait("stage", drive.now) == 0.0


def test_a_path_takes_its_slowest_lane() -> None:
    model = CostModel(PAGE)
    model.seed_lane("stage", 1e-4, 1e9)
    model.seed_lane("onboard", 1e-5, 10e9)
    seconds = model.load(LOAD, 100, 0.0)
    assert seconds == pytest.approx(1e-4 + 100 * PAGE / 1e9 + 1e-5 + PAGE / 10e9, rel=0.01)


def test_prefill_is_learnt_with_its_attention(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel(PAGE)

    def true(tokens: int, context: int) -> float:
        return 1e-3 + 2e-4 * tokens + 1e-7 * tokens * (context + tokens / 2)

    for _ in range(400):
        context = rng.randrange(0, 8192, 64)
        model.observe_prefill(64, context, true(64, context) * rng.uniform(0.9, 1.1))
    whole = sum(true(64, context) for context in range(0, 4096, 64))
    assert model.recompute(4096, 0) == pytest.approx(whole, rel=0.1), f"seed {seed}"
    assert model.recompute(512, 4096) == pytest.approx(sum(true(64, 4096 + 64 * i) for i in range(8)), rel=0.1)


def test_a_prefill_of_another_speed_is_believed_within_a_few_passes() -> None:
    model = CostModel(PAGE)
    for index in range(50):
        model.observe_prefill(64, 64 * index, 0.01)
    for _ in range(4):
        model.observe_prefill(64, 0, 0.05)
    assert model.recompute(64, 0) == pytest.approx(0.05, rel=0.1)


def test_a_report_that_is_not_final_or_moved_nothing_teaches_nothing() -> None:
    model = CostModel(PAGE)
    status = np.ones((1, 1), np.uint8)
    model.completed(Completion(1, False, status, (HopReport("stage", PAGE, 0, 1, 1.0, 2.0, PAGE),), 1.0, 2.0))
    model.completed(Completion(2, True, status, (HopReport("stage", 0, 0, 0, 0.0, 0.0),), 1.0, 2.0))
    model.completed(Completion(3, True, status, (), 1.0, 2.0))
    assert model.lane_speed("stage") is None


def test_by_when_transfers_were_expected() -> None:
    model = CostModel(PAGE)
    model.submitted(1, STAGE, 8, Priority.DEMAND, 10.0)
    assert model.expected_end([1]) is None
    model.seed_lane("stage", 1e-3, 1e9)
    model.submitted(2, STAGE, 8, Priority.DEMAND, 10.0)
    assert model.expected_end([2]) > 10.0 + 8 * PAGE / 1e9
    assert model.expected_end([1, 2]) is None
    assert model.expected_end([]) == 0.0


def test_what_overruns_is_believed_before_it_has_ended() -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 2e9)
    for _ in range(10):
        drive.move(8)
    for _ in range(2):
        drive.now += 1.0
        drive.tickets += 1
        model.submitted(drive.tickets, STAGE, 8, Priority.DEMAND, drive.now)
        model.overran([drive.tickets, 999], drive.now + 0.5)
        status = np.full((1, 8), 2, np.uint8)
        model.completed(Completion(drive.tickets, True, status, (HopReport("stage", 0, 0, 0),), drive.now, drive.now))
    assert model.load(STAGE, 8, drive.now) >= 0.45


def test_what_is_seeded_is_what_is_told() -> None:
    model = CostModel(PAGE)
    model.seed_lane("stage", 2e-4, 3e9)
    model.seed_prefill((1e-3, 2e-5, 0.0), 256)
    fixed, rate = model.lane_speed("stage")
    assert (fixed, rate) == (pytest.approx(2e-4, rel=0.01), pytest.approx(3e9, rel=0.01))
    assert model.recompute(512, 0) == pytest.approx(2e-3 + 512 * 2e-5, rel=0.01)
    with pytest.raises(ValueError, match=r"'ferry'.*accepted: offload, onboard, spill, stage"):
        model.seed_lane("ferry", 0.0, 1.0)
    with pytest.raises(ValueError, match="pass_tokens: 0"):
        model.seed_prefill((0.0, 1.0, 0.0), 0)


def test_what_is_recalled_is_all_that_the_other_knew_and_what_is_under_way_stays() -> None:
    fast, model = CostModel(PAGE), CostModel(PAGE)
    Drive(fast, 2e9).move(64)
    fast.observe_prefill(64, 0, 0.01)
    drive = Drive(model, 1e8)
    drive.move(64)
    begun = drive.begin(64)
    model.recall(fast)
    assert model.lane_speed("stage") == fast.lane_speed("stage")
    assert model.last_end("stage") == fast.last_end("stage") > 0
    assert model.recompute(128, 0) == fast.recompute(128, 0)
    assert model.expected_end([begun[0]]) > drive.now + 0.5, "said when it was submitted"
    assert fast.expected_end([begun[0]]) == 0.0
    drive.end(begun)
    assert model.lane_speed("stage") != fast.lane_speed("stage"), "each learns for itself"
    model.recall(CostModel(PAGE))
    assert model.describe() == "nothing measured yet"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_ignored(seconds: float) -> None:
    fit = Fit((1e-3, 1e-6))
    fit.observe((1.0, 5.0), seconds)
    assert fit.predict((1.0, 5.0)) is None


def test_coefficients_are_never_negative(seed: int) -> None:
    rng = random.Random(seed)
    fit = Fit((1e-3, 1e-6, 1e-4))
    for _ in range(500):
        fit.observe((1.0, rng.random() * 100, rng.random() * 1e6), rng.random() + 1e-6)
        assert min(fit.coefficients) >= 0, f"seed {seed}"
        assert all(math.isfinite(c) for c in fit.coefficients), f"seed {seed}"


HOP = HopReport("stage", PAGE, 0.0, 1.0, 1.0, 2.0, PAGE)
ONE = np.ones((1, 1), np.uint8)


@pytest.mark.parametrize(
    "said",
    [
        None,
        (1, True),
        Completion(1, True, None, (HOP,), 0.0, 0.0),
        Completion(1, True, ONE.astype(np.int64), (HOP,), 0.0, 0.0),
        Completion(1, True, np.ones((3, 1), np.uint8), (HOP,), 0.0, 0.0),
        Completion(1, True, np.ones((0, 1), np.uint8), (), 0.0, 0.0),
        Completion(1, True, np.empty((1, 1 << 32), np.uint8), (HOP,), 0.0, 0.0),  # whose bytes nobody looks at
        Completion(1, True, ONE, (HOP[:3],), 0.0, 0.0),
        Completion(1, True, ONE, (HOP._replace(carried=-1),), 0.0, 0.0),
        Completion(-1, True, ONE, (HOP,), 0.0, 0.0),
    ],
)
def test_what_is_no_completion_is_refused_in_one_line(said: object) -> None:
    """It may come from another process."""
    model, catalog = CostModel(PAGE), Catalog([TierSpec(Tier.HOST, 4)], block_size=4)
    traffic = Traffic(catalog.native, model)
    for call in (lambda: model.completed(said), lambda: traffic.settle([said])):
        with pytest.raises(TypeError, match=r"^completion: .*; accepted: a kvtier\.messages\.Completion") as fault:
            call()
        assert "\n" not in str(fault.value)
    with pytest.raises(TypeError, match="tickets: accepted: whole numbers"):
        model.overran([None], 1.0)


@pytest.mark.parametrize("priority", [-5, 3, 99, 1 << 20])
def test_a_priority_that_is_none_is_refused_by_its_own_number(priority: int) -> None:
    model = CostModel(PAGE)
    model.submitted(1, STAGE, 1, Priority.DEMAND, 1.0)
    for call in (
        lambda: model.submitted(2, STAGE, 1, priority, 1.0),
        lambda: model.promoted(1, priority),
        lambda: model.queue_wait("stage", 1.0, priority),
        lambda: model.load(STAGE, 1, 1.0, priority),
    ):
        with pytest.raises(ValueError, match=f"^priority: {priority}; accepted: 0 demand, 1 prefetch, 2 background$"):
            call()


def test_a_transfer_is_promoted_and_never_put_back() -> None:
    model = CostModel(PAGE, bytes_in_flight=0)
    model.seed_lane("stage", 0.0, 1e9)
    model.submitted(1, STAGE, 100, Priority.DEMAND, 1.0)
    model.promoted(1, Priority.BACKGROUND)  # the data plane serves it at least as urgently, too
    assert model.queue_wait("stage", 1.0) > 0


@pytest.mark.parametrize("times", [(1.0, math.inf), (math.nan, 2.0), (1.0, math.nan), (-math.inf, 2.0), (2.0, 1.0)])
def test_a_hop_whose_times_are_none_teaches_nothing_and_costs_what_follows_nothing(times: tuple[float, float]) -> None:
    model = CostModel(PAGE)
    drive = Drive(model, 1e9)
    hop = HopReport("stage", PAGE, 0.0, 1.0, *times, PAGE)
    model.completed(Completion(77, True, np.ones((1, 1), np.uint8), (hop,), 1.0, 2.0))
    assert model.lane_speed("stage") is None
    assert model.last_end("stage") == 0.0
    for _ in range(4):
        drive.move(8)
    assert model.lane_speed("stage")[1] == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_a_prefill_whose_time_is_none_says_nothing_of_how_large_passes_are(seconds: float) -> None:
    model = CostModel(PAGE)
    for context in range(0, 4096, 64):
        model.observe_prefill(64, context, 1e-3 + 64 * 1e-5)
    known = model.recompute(4096, 0)
    model.observe_prefill(1 << 40, 0, seconds)
    assert model.recompute(4096, 0) == known
    assert model.prefill_speed()[1] == 64


def test_what_overruns_is_measured_from_the_first_of_its_own_lane() -> None:
    model = CostModel(PAGE)
    model.submitted(1, STAGE, 1, Priority.DEMAND, 100.0)
    model.submitted(2, (Tier.HOST, Tier.DEVICE), 1, Priority.DEMAND, 1.0)
    model.overran([1, 2], 101.0)
    assert model.load(STAGE, 1, 1000.0) == pytest.approx(1.0, rel=0.1), "another lane's wait was taken for this one's"


@pytest.mark.parametrize("wrong", [(math.inf, 1e9), (math.nan, 1e9), (-1.0, 1e9), (0.0, 0.0), (0.0, math.inf)])
def test_a_speed_that_is_none_is_not_begun_with(wrong: tuple[float, float]) -> None:
    model = CostModel(PAGE)
    with pytest.raises(ValueError, match=r"^lane 'stage': .*; accepted: "):
        model.seed_lane("stage", *wrong)
    assert model.lane_speed("stage") is None
