"""`kvtier bench prefetch` at its smallest: every arm does what its name says, or the run ends."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.catalog import Tier
from kvtier.cli.main import main
from kvtier.lab.prefetch_bench import _RULES, PrefetchBench, PrefetchSettings
from kvtier.lab.prefetch_results import ARMS, Cell, bootstrap_bounds
from kvtier.lab.rig import ProofError


def test_a_run_writes_rows_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    options = [
        "--prompts=3", "--prompt-tokens=128", "--token-us=20", "--gbps=0.2", "--reuse=0.5", "--lookahead=0,20",
        "--hold-every=2",
    ]  # fmt: skip
    assert main(["bench", "prefetch", *options, "--disk-path", str(tmp_path), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "result.json").read_text())
    assert result["compute"] == "paced"
    assert [row["lookahead_ms"] for row in result["rows"]] == [0, 20]
    for row in result["rows"]:
        assert (row["n"], row["found_tokens"], row["lane_gbps"], row["held"]) == (3, 64, 0.2, [0, 2])
        assert max(row["idle_gbps_each"]) < 0.21, "no load is faster than the drive that is emulated"
        follows(row, 4 * 65536)
    assert result["rows"][0]["hidden"] is None is not result["rows"][1]["hidden"]
    assert (out / "prefetch.png").read_bytes().startswith(b"\x89PNG")
    assert oct((out / "result.json").stat().st_mode & 0o777) == "0o600"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".kvtier")], "the store went"


def follows(row: dict, size: int) -> None:
    """Everything in a row is what its values by prompt say, loads being of so many bytes."""
    each = row["ttft_ms_each"]
    assert {arm: len(times) for arm, times in each.items()} == dict.fromkeys(ARMS, row["n"])
    for arm, times in each.items():
        assert row["ttft_ms"][arm]["p50"] == pytest.approx(median(times))
    load_ms = size / median(row["idle_gbps_each"]) / 1e6
    assert row["load_ms"] == pytest.approx(load_ms)
    assert row["lookahead_exceeds_load"] == (row["lookahead_ms"] > load_ms)
    best = min(each["load"], each["recompute"], key=median)
    ratios = [own / other for own, other in zip(each["kvtier"], best, strict=True)]
    assert row["ratio_to_best"] == pytest.approx(median(ratios))
    assert max(ratios) >= row["ratio_to_best_upper"] >= median(ratios)
    pairs = list(zip(each["load"], each["device"], strict=True))
    assert row["load_to_floor"] == pytest.approx(median(own / (hit + load_ms) for own, hit in pairs))
    if row["lane_gbps"]:
        nominal = size / row["lane_gbps"] / 1e6
        assert row["load_to_floor_nominal"] == pytest.approx(median(own / (hit + nominal) for own, hit in pairs))
    if row["lookahead_ms"]:
        hidden = [1 - (own - hit) / load_ms for own, hit in zip(each["kvtier"], each["device"], strict=True)]
        assert row["hidden"] == pytest.approx(median(hidden))
        assert row["hidden_held"] == pytest.approx(median(hidden[number] for number in row["held"]))
        assert min(hidden) <= row["hidden_lower"] <= row["hidden"] <= row["hidden_upper"] <= max(hidden)


def measured_cell(lookahead_ms: float = 50.0) -> Cell:
    """Three prompts on a lane of 2 GB/s, whose loads were served at half of that."""
    times = {"load": [14.0, 15.0, 40.0], "recompute": [70.0, 71.0, 72.0]}
    times |= {"kvtier": [10.0, 12.0, 32.0], "device": [10.0, 10.0, 30.0]}
    cell = Cell(lookahead_ms, None, 0.5, 128, 64, 4_000_000, times, held=[0], idle_gbps=[1.0, 2.0, 4.0])
    cell.loaded_tokens, cell.own_bytes, cell.own_s = 3 * 64, 12_000_000, 0.012
    return cell


def test_loads_are_held_against_what_the_lane_does_without_them() -> None:
    row = measured_cell(0.0).row(0)
    assert (row.idle_gbps, row.load_ms, row.measured_gbps) == (2.0, 2.0, 1.0)
    assert row.load_to_floor == pytest.approx(15 / 12)
    assert row.load_to_floor_own == pytest.approx(15 / 14), "at the rate of the loads themselves they look better"
    assert row.load_to_floor_nominal is None
    assert row.hidden is row.hidden_lower is row.hidden_upper is row.hidden_held is None
    assert (row.best, row.ratio_to_best, row.loaded_share) == ("load", pytest.approx(0.8), 1.0)
    follows(row.model_dump(), 4_000_000)


def test_what_is_hidden_is_told_of_pairs_and_not_of_medians() -> None:
    row = measured_cell().row(0)
    assert row.hidden == 0.0, "the medians of both are as far apart, but so are two of three pairs"
    assert (row.hidden_lower, row.hidden_upper, row.hidden_held) == (0.0, 1.0, 1.0)
    follows(row.model_dump(), 4_000_000)
    uneven = measured_cell()
    uneven.ttft_ms["kvtier"], uneven.ttft_ms["device"] = [10.0, 20.0, 90.0], [10.0, 16.0, 88.0]
    assert uneven.row(0).hidden == 0.0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[PrefetchBench]:
    settings = PrefetchSettings(prompts=1, prompt_tokens=64, token_us=1.0, reuses=(0.5,), disk_path=tmp_path)
    with PrefetchBench(settings) as bench:
        bench.prepare()
        yield bench


@pytest.mark.parametrize(
    ("arm", "rule", "said"),
    [
        ("load", "never", "load: 0 tokens were not computed; 32 should have been"),
        ("recompute", "always", "recompute: 32 tokens were not computed; 0 should have been"),
    ],
)
def test_an_arm_that_does_what_another_should_ends_the_run(
    arm: str, rule: str, said: str, small: PrefetchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_RULES, arm, rule)
    with pytest.raises(ProofError, match=said):
        small.cell(0.0, 0.0, 0.5)


def test_a_device_hit_that_was_loaded_ends_the_run(small: PrefetchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_RULES, "device", "always")
    serve = small._serve

    def serve_from_disk(arm: str, prompt: list[int], cell: Cell | None = None, *, hold: bool = False) -> object:
        if arm == "device":
            for tier in (Tier.DEVICE, Tier.HOST):
                small.manager.evict(tier, prompt[:32])
        return serve(arm, prompt, cell, hold=hold)

    monkeypatch.setattr(small, "_serve", serve_from_disk)
    with pytest.raises(ProofError, match="device: 2 pages came by the lane 'stage'; 0 should have"):
        small.cell(0.0, 0.0, 0.5)


def test_an_idle_load_that_finds_pages_in_memory_is_none(small: PrefetchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.lab.prefetch_bench.empty_faster", lambda *_: None)
    with pytest.raises(ProofError, match="an idle load: 0 pages came from disk; 8 should have"):
        small._load_idly(small._documents[0.5])


def test_each_arm_knows_what_its_own_requests_have_taught_it(small: PrefetchBench) -> None:
    before = small.manager.costs.describe()
    assert "prefill" in before, "the documents were computed"
    small.cell(0.0, 0.0, 0.5)
    assert small.known["load"].lane_speed("stage") is not None
    for arm in ("recompute", "device"):
        assert small.known[arm].lane_speed("stage") is None, "it has loaded nothing"
    speeds = {arm: small.known[arm].prefill_speed() for arm in ARMS}
    assert None not in speeds.values()
    assert len(set(speeds.values())) == len(ARMS)
    known = small.known["kvtier"].describe()
    small._serve("load", [*small._documents[0.5][0], 1])
    small._load_idly(small._documents[0.5])
    assert small.known["kvtier"].describe() == known, "what is served between the prompts teaches none of them"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lookahead=x", "lookahead"),
        ("--reuse=1.5", "reuse: [1.5]; accepted"),
        ("--gbps=-1", "gbps: [-1.0]; accepted"),
    ],
)
def test_bad_options_are_named(option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefetch", option, "--disk-path", str(tmp_path)]) != 0
    assert said in capsys.readouterr().err


def test_the_bootstrap_bounds_the_median() -> None:
    # The median of n lies in 95 % of cases within n / 2 ± 0.98 √n of the order statistics: here 51 ± 9.8.
    low, high = bootstrap_bounds(list(range(1, 102)), 0)
    assert 40 <= low <= 42
    assert 60 <= high <= 62
    assert bootstrap_bounds([1.0] * 100, 0) == (1.0, 1.0)
    assert bootstrap_bounds([1.0] * 60 + [2.0] * 40, 0)[0] == 1.0


def test_settings_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="prompts: 0"):
        PrefetchSettings(prompts=0)


class Clock:
    """Time that passes only while the engine waits for news."""

    def __init__(self, bench: PrefetchBench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits, self.announced = 0.0, [], []
        poll, expect = bench.manager.poll, bench.manager.expect

        def wait(timeout: float = 0.0) -> object:
            self.now += max(timeout, 1e-9)  # what rounding leaves passes too
            self.waits += [timeout] if timeout > 1e-6 else []
            return poll()

        def announce(name: str, tokens: list[int], within: float) -> None:
            self.announced.append(tokens)
            expect(name, tokens, within)

        monkeypatch.setattr(bench.manager, "poll", wait)
        monkeypatch.setattr(bench.manager, "expect", announce)
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr("kvtier.lab.prefetch_bench.time", clock)

    def idled(self, bench: PrefetchBench, arm: str, *, hold: bool, ahead_ms: float = 50) -> list[float]:
        """How an arm waits ahead of its request, whose pages are on the device: there is nothing to bring."""
        bench.manager.prefetch(bench._documents[0.5][0])
        bench._settle()  # nothing of what was before is under way either
        self.now = 0.0
        self.waits.clear()
        cell = Cell(ahead_ms, None, 0.5, 64, 32, 2 * 65536)
        bench._serve(arm, [*bench._documents[0.5][0], *range(32)], cell, hold=hold)
        return list(self.waits)


def test_every_arm_idles_alike_ahead_of_its_request(small: PrefetchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(small, monkeypatch)
    clock.idled(small, "load", hold=True)  # what was on disk is on the device now
    held = {arm: clock.idled(small, arm, hold=True) for arm in ARMS}
    assert held == dict.fromkeys(ARMS, pytest.approx([0.01] * 5)), "to the end of the look-ahead"
    brief = {arm: clock.idled(small, arm, hold=False) for arm in ARMS}
    assert brief == dict.fromkeys(ARMS, pytest.approx([0.01])), "there was nothing to bring, so a moment only"
    for arm in ("device", "recompute"):
        small._waited = 0.03  # as long as the one before had something to bring
        assert clock.idled(small, arm, hold=False) == pytest.approx([0.01] * 4)
        small._waited = 0.3
        assert clock.idled(small, arm, hold=False, ahead_ms=500) == pytest.approx([0.01] * 6), "or 50 ms"


def test_every_arm_is_announced_but_one_that_computes_with_nothing_that_could_be_brought(
    small: PrefetchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, document = Clock(small, monkeypatch), small._documents[0.5][0]
    for arm in ARMS:
        clock.idled(small, arm, hold=True)
    whole = [*document, *range(32)]
    assert dict(zip(ARMS, clock.announced, strict=True)) == {
        "load": whole, "recompute": list(range(32)), "kvtier": whole, "device": whole
    }  # fmt: skip
