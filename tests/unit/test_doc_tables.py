"""The tables of docs/vllm.md say what the result files say that they name: each row as it follows from its file."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).parents[2]
PAGE = (TREE / "docs/vllm.md").read_text()

ARMS = {
    "none": "vLLM alone",
    "kvtier-host": "kvtier, host",
    "kvtier-disk": "kvtier, disk",
    "vllm-offloading": "vLLM's offloading",
    "vllm-fs": "vLLM's file system tier",
    "lmcache": "LMCache",
}
MEASURED = {"ttft": "TTFT", "cpu": "processor time"}


def result(name: str) -> dict[str, Any]:
    assert f"../bench/results/{name}" in PAGE, "the page no longer names it"
    content: dict[str, Any] = json.loads((TREE / "bench/results" / name).read_text())
    return content


def ms(value: float, bounds: list[float] | None = None) -> str:
    return f"{value:,.0f}" + (f" ({bounds[0]:,.0f}–{bounds[1]:,.0f})" if bounds else "")


def missing(rows: list[str]) -> list[str]:
    """Those that the page does not have; how wide a table is drawn does not count."""
    lines = {re.sub(r"\s+", " ", line) for line in PAGE.splitlines()}
    return [row for row in rows if row not in lines]


@pytest.mark.parametrize("name", ["2026-11-30-vllm-2-cores.json", "2026-11-30-vllm-lmcache-2-cores.json"])
def test_ttft_of_each_arm_is_what_was_measured(name: str) -> None:
    cases = ("first", "evicted", "device")
    rows = {(row["arm"], row["case"]): row for row in result(name)["rows"]}
    said = [
        f"| {ARMS[arm]} | "
        + " | ".join(ms(rows[arm, case]["ttft_ms"]["p50"], rows[arm, case]["ttft_ms_p50_bounds"]) for case in cases)
        + " |"
        for arm in dict.fromkeys(arm for arm, _ in rows)
    ]
    assert not missing(said)
    assert all(rows[arm, case]["same_answers"] == rows[arm, case]["n"] for arm, case in rows), "the page says all"


def test_every_aim_is_in_the_table_met_or_missed() -> None:
    aims = result("2026-11-30-vllm-2-cores.json")["aims"]
    said = [
        f"| {aim['aim']} ({MEASURED[aim['of']]}, n = {aim['n']}) | {aim['ratio']:.2f} | {aim['bounds'][0]:.2f}–"
        f"{aim['bounds'][1]:.2f} | ≤ {aim['at_most']:g} | {'met' if aim['met'] else 'missed'} |"
        for aim in aims
    ]
    assert not missing(said)


def test_beside_lmcache_both_the_ratio_and_what_was_missed_are_told() -> None:
    content = result("2026-11-30-vllm-lmcache-2-cores.json")
    ours, theirs = (content["asked"][arm]["evicted"] for arm in ("kvtier-host", "lmcache"))
    ratio = statistics.median(ours[n]["ttft"] / theirs[n]["ttft"] for n in ours.keys() & theirs.keys())
    assert f"takes {ratio:.2f} (" in PAGE
    (missed,) = (aim for aim in content["aims"] if not aim["met"])
    low, high = missed["bounds"]
    assert f"{missed['ratio']:.2f} ({low:.2f}–{high:.2f}; aim ≤ {missed['at_most']:g}, missed)" in PAGE


@pytest.mark.parametrize(
    ("name", "ended", "said"),
    [
        ("2026-11-30-vllm-2-cores.json", "not yet", "looked at before its end"),
        ("2026-11-30-vllm-lmcache-2-cores.json", "early, by SIGTERM", "stopped before its end"),
        ("2026-11-30-vllm-step-2-cores.json", "at its end", ""),
        ("2026-11-30-vllm-slow-disk-2-cores.json", "at its end", ""),
        ("2026-11-30-vllm-queue-2-cores.json", "at its end", ""),
    ],
)
def test_a_run_that_did_not_come_to_its_end_is_told_so(name: str, ended: str, said: str) -> None:
    assert result(name)["ended"] == ended
    paragraph = next(part for part in PAGE.split("\n\n") if name in part)
    assert said in paragraph.replace("\n", " ")


def test_what_kvtier_takes_of_a_step_is_what_was_measured() -> None:
    many, where = {1: "one request", 4: "four at once"}, {"kvtier-host": "host", "kvtier-disk": "host and disk"}
    said = []
    for row in result("2026-11-30-vllm-step-2-cores.json")["rows"]:
        low, high = (bound / 1e3 for bound in row["calls_us_a_step_p50_bounds"])
        least, most = (100 * bound for bound in row["share_p50_bounds"])
        said.append(
            f"| {where[row['arm']]}, {many[row['at_once']]} | {row['step_cpu_ms_p50']:.0f} | "
            f"{row['calls_us_a_step_p50'] / 1e3:.2f} ({low:.2f}–{high:.2f}) | "
            f"{100 * row['share_p50']:.2f} % ({least:.2f}–{most:.2f}) |"
        )
    assert not missing(said)


def test_with_a_slow_disk_it_is_what_was_measured() -> None:
    said = []
    for row in result("2026-11-30-vllm-slow-disk-2-cores.json")["rows"]:
        speed, ttft = row["disk_mb_per_s"], row["ttft_ms_p50"]
        low, high = row["to_the_faster_bounds"]
        took = " | ".join(ms(ttft[arm]) for arm in ("none", "always", "kvtier"))
        name, met = "not throttled" if speed is None else f"{speed:g} MB/s", "met" if row["met"] else "missed"
        ratio = f"{row['to_the_faster']:.2f} | {low:.2f}–{high:.2f} | ≤ {row['at_most']:.2f}, {met}"
        said.append(f"| {name} | {took} | {ratio} |")
    assert not missing(said)


def test_what_the_look_ahead_gives_is_what_was_measured() -> None:
    (row,) = result("2026-11-30-vllm-queue-2-cores.json")["rows"]
    compared = row["to_no_look_ahead"]
    low, high = compared["bounds"]
    assert compared["n"] == 16
    assert f"{compared['ratio']:.2f} × as late ({low:.2f}–{high:.2f})" in PAGE


# ---- docs/latency.md ---------------------------------------------------------------------------------------------


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def verdict(met: list[bool]) -> str:
    return "met" if all(met) else f"met in {sum(met)} of {len(met)} cells"


def hidden_of(row: dict[str, Any], prompts: list[int]) -> list[float]:
    own, hit = (row["ttft_ms_each"][arm] for arm in ("kvtier", "device"))
    return [1 - (own[number] - hit[number]) / row["load_ms"] for number in prompts]


def told_of_floor(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"] if not row["lookahead_ms"]]
    ratios = [row["load_to_floor"] for row in rows]
    if result["version"] == "kvtier.bench.prefetch/1":
        return f"| {spread(ratios)}, by the rate of the loads themselves | met by that |"
    own = spread([row["load_to_floor_own"] for row in rows])
    return f"| {spread(ratios)}; by the rate of the loads themselves {own} | {verdict([r <= 1.1 for r in ratios])} |"


def told_of_hidden(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"] if row["lookahead_exceeds_load"]]
    shares, loads = [row["hidden"] for row in rows], [row["load_ms"] for row in rows]
    cells = f"{spread(shares)} in all {len(rows)} cells (loads of {min(loads):.1f} to {max(loads):.0f} ms)"
    if result["version"] == "kvtier.bench.prefetch/1":
        return f"| {cells} | met |"
    lower, held = (
        [row["hidden_lower"] for row in rows],
        [share for row in rows for share in hidden_of(row, row["held"])],
    )
    return (
        f"| {cells}, lower bounds {spread(lower)}; median of the {len(held)} held to the end "
        f"{statistics.median(held):.2f} | {verdict([share >= 0.95 for share in shares])} |"
    )


def test_the_second_promise_is_told_as_it_was_measured() -> None:
    page = (TREE / "docs/latency.md").read_text()
    result = json.loads((TREE / "bench/results/2026-12-01-prefetch-2-cores.json").read_text())
    rows = result["rows"]
    uppers = [row["ratio_to_best_upper"] for row in rows]
    best = [row["ratio_to_best"] <= 1.05 and row["ratio_to_best_upper"] <= 1.10 for row in rows]
    ratios = spread([row["ratio_to_best"] for row in rows])
    split = [row for row in rows if row["ratio_to_best"] < 0.8]
    said = [
        f"{len(rows)} cells of 100 prompts",
        f"own: {ratios}, upper bounds at most {max(uppers):.2f} | {verdict(best)} |",
        told_of_floor(result),
        *(f"{1 / row['ratio_to_best']:.2f} × at {row['lane_gbps']} GB/s" for row in split),
        told_of_hidden(result),
    ]
    assert [words for words in said if words not in page] == []
    assert {row["n"] for row in rows} == {100}


def test_what_hides_behind_what_is_told_as_it_was_measured() -> None:
    page = (TREE / "docs/latency.md").read_text()
    lines = (TREE / "bench/results/2026-11-30-overlap-2-cores.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    whole, layers, hidden, disk, together = (figures[place::5] for place in range(5))
    times = [sorted(f"{run['value']:.0f}" for run in runs) for runs in (layers, whole)]
    both = [" and ".join(f"{run['ratio']:.2f}" for run in runs) for runs in (layers, hidden, disk, together)]
    said = [
        "{} to {} ms against {} to {} waited for as a whole".format(*times[0], *times[1]),
        f"that is {both[0]} × the longer of both in the two runs, and {both[1]} of the load hidden",
        f"takes {both[2]} × the slower lane alone; of the faster lane's work {both[3]} passed beside the slower one",
    ]
    assert [words for words in said if words not in page] == []


def test_what_a_step_costs_is_told_as_it_was_measured() -> None:
    page = (TREE / "docs/latency.md").read_text()
    lines = (TREE / "bench/results/2026-12-01-overhead-2-cores.jsonl").read_text().splitlines()
    rows = {row["name"]: row for row in map(json.loads, lines)}
    cold = rows["300 squares in plain Python, after a pause"]
    mean = rows["CPU in kvtier's calls, mean of all steps, no reuse"]
    names = ("median of all steps", "mean step that decodes", "median step that decodes")
    median, decoding, usual = (rows[f"CPU in kvtier's calls, {name}, no reuse"]["value"] / 1e3 for name in names)
    adds = rows["CPU in kvtier's calls, what a request that enters adds, no reuse"]["value"] / 1e3
    worst = {
        (clock, which): rows[f"{clock} in kvtier's calls, p99 of {which}, saturated"]["value"] / 1e3
        for clock in ("CPU", "wall")
        for which in ("all steps", "steps that decode")
    }
    said = [
        f"| {mean['value'] / 1e3:.3f} ms the mean of all steps, {100 * mean['ratio']:.2f} %, {median:.3f} the median; "
        f"of steps that only decode {decoding:.3f} and {usual:.3f}; a request that enters adds {adds:.2f} | "
        f"{'met' if mean['ratio'] < 0.01 else 'missed'}",
        f"| CPU {worst['CPU', 'all steps']:.2f} ms, wall {worst['wall', 'all steps']:.2f}; of steps that only decode "
        f"{worst['CPU', 'steps that decode']:.2f} and {worst['wall', 'steps that decode']:.2f}",
        f"({cold['value']:.0f} and {cold['limit']:.0f} µs",
    ]
    assert [words for words in said if words not in page] == []
