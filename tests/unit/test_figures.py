"""Figures are one JSON object a line, and pairs are interleaved."""

import json

import pytest

from kvtier.lab.figures import Figure, paired


def test_figure_is_one_json_object_on_one_line() -> None:
    line = Figure("page copy, 64 KiB", 9.5, "GB/s", 10.0, "memcpy of the same bytes", 0.95).to_json()
    assert "\n" not in line
    assert list(json.loads(line)) == ["name", "value", "unit", "limit", "limit_is", "ratio"]


def test_figure_without_a_limit_says_null() -> None:
    assert json.loads(Figure("match", 0.1, "ms").to_json())["limit"] is None


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    ours = iter([99.0, 1.0, 10.0, 30.0])
    limit = iter([99.0, 2.0, 100.0, 31.0])
    result = paired(lambda: next(ours), lambda: next(limit), pairs=3)
    assert result.value == 10.0
    assert result.limit == 31.0
    assert result.ratio == 0.5
    assert result.figure("x", "GB/s", "y").ratio == 0.5


def test_order_within_a_pair_alternates() -> None:
    calls: list[str] = []

    def note(what: str) -> float:
        calls.append(what)
        return 1.0

    paired(lambda: note("ours"), lambda: note("limit"), pairs=2, warmup=0)
    assert calls == ["ours", "limit", "limit", "ours"]


def test_refuses_measurements_that_are_not_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        paired(lambda: 0.0, lambda: 1.0)
    with pytest.raises(ValueError, match="pairs=0"):
        paired(lambda: 1.0, lambda: 1.0, pairs=0)
