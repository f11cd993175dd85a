"""The lab's figures mean what they are called."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvtier.lab.measure import add_counts, difference, outputs_match, percentiles, summarise
from kvtier.lab.request import Result


def result(request_id: str, submitted: float, times: list[float], reason: str = "length") -> Result:
    made = Result(request_id, 10, submitted, reason, list(range(len(times))), times)
    made.tokens_by_tier = {"host": 6, "computed": 4}
    return made


def test_ttft_runs_from_submission_and_tpot_leaves_the_first_token_out():
    row = summarise([result("a", 1.0, [1.5, 1.6, 1.9])], 2.0)
    assert row["ttft_ms"]["mean"] == pytest.approx(500)
    assert row["tpot_ms"]["mean"] == pytest.approx(200)
    assert row["itl_ms"]["p50"] == pytest.approx(200)
    assert row["e2el_ms"]["p50"] == pytest.approx(900)
    assert row["request_throughput"] == 0.5
    assert row["output_throughput"] == 1.5
    assert row["tokens_by_tier"] == {"device": 0, "host": 6, "disk": 0, "remote": 0, "computed": 4}


def test_one_token_has_no_tpot():
    row = summarise([result("a", 1.0, [1.5])], 1.0)
    assert row["n"] == 1
    assert row["tpot_ms"] == {"mean": None, "p50": None, "p90": None, "p95": None, "p99": None}


def test_what_failed_is_in_no_figure():
    row = summarise([result("a", 0.0, [1.0, 2.0]), result("b", 0.0, [50.0, 99.0], "abort")], 1.0)
    assert (row["n"], row["failed"]) == (1, 1)
    assert row["ttft_ms"]["mean"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("n", "known"),
    [
        (0, ""),
        (1, "p50"),
        (9, "p50"),
        (10, "p50 p90"),
        (19, "p50 p90"),
        (20, "p50 p90 p95"),
        (99, "p50 p90 p95"),
        (100, "p50 p90 p95 p99"),
    ],
)
def test_a_percentile_is_null_where_there_are_too_few_values(n, known):
    stats = percentiles([0.001] * n)
    assert {name for name, value in stats.items() if value is not None} == ({"mean", *known.split()} if n else set())


def test_percentiles_interpolate_like_numpy():
    values = np.random.default_rng(0).random(200)
    stats = percentiles(values)
    for percent in (50, 90, 95, 99):
        assert stats[f"p{percent}"] == pytest.approx(np.percentile(values, percent) * 1e3)


def test_outputs_match_only_when_every_token_does():
    results = [result("a", 0.0, [1.0, 2.0]), result("b", 0.0, [1.0])]
    assert outputs_match(results, {"a": [0, 1], "b": [0]})
    assert outputs_match(results, [[0, 1], [0]])
    assert not outputs_match(results, {"a": [0, 1], "b": [1]})
    assert not outputs_match(results, {"a": [0, 1]})
    assert not outputs_match(results, [[0, 1], [0, 1]])
    assert not outputs_match([], {})


def test_counts_add_and_subtract():
    assert add_counts([{"host": 1}, {"host": 2, "disk": 3}])["host"] == 3
    assert difference({"a": 5, "b": 2}, {"a": 3}) == {"a": 2, "b": 2}


_PEAKS = """
import numpy as np
from kvtier.lab.measure import PeakMemory
with PeakMemory() as peak:
    block = np.ones(64 << 20, np.uint8)
    del block
assert peak.rss_bytes >= peak.rss_before + (60 << 20), vars(peak)
if not peak.since_start:
    with PeakMemory() as again:
        pass
    assert again.rss_bytes < peak.rss_bytes, (vars(peak), vars(again))
"""


def test_peak_memory_is_seen_after_it_is_gone():
    pytest.importorskip("psutil")
    pytest.importorskip("torch")
    # In a process of its own: what other tests left behind goes when it likes, and memory that goes hides a peak.
    ran = subprocess.run([sys.executable, "-c", _PEAKS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
