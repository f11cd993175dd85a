"""`kvtier bench overlap`: what hides behind what, from what was measured, and that each arm is served as it says."""

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.lab import overlap


def test_the_figures_are_those_of_the_rounds() -> None:
    times = overlap._Times()
    times.first = {"device": [0.010, 0.011], "whole": [0.030, 0.031], "layers": [0.025, 0.026], "disk": [0.050, 0.051]}
    times.busy = {"device": [(0.0, 0.0)] * 2, "disk": [(0.030, 0.020)] * 2}
    times.busy |= {"whole": [(0.0, 0.020)] * 2, "layers": [(0.0, 0.005)] * 2}
    whole, layers, hidden = overlap._one_lane(times, 128)
    assert (whole.value, whole.limit, whole.ratio) == pytest.approx((30.5, 20.0, 30.5 / 20))
    assert (layers.value, layers.limit) == pytest.approx((25.5, 10.5)), "the pass is the longer of both"
    assert layers.ratio == pytest.approx((25 / 10 + 26 / 11) / 2)
    assert (hidden.value, hidden.unit) == (pytest.approx(0.25), "share")
    load, together = overlap._two_lanes(times, 128)
    assert (load.value, load.limit, load.ratio) == pytest.approx((40.0, 30.0, 40 / 30))
    assert together.value == pytest.approx(0.5), "half of what the faster lane worked passed beside the slower"


def test_each_arm_is_served_from_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = [0], {}
    measure, wait = overlap._Bench.measure, overlap.CacheManager.wait_for_layer

    def waits(manager: overlap.CacheManager, request_id: str, layer: int) -> bool:
        asked[0] += 1
        return wait(manager, request_id, layer)

    def measures(bench: overlap._Bench, arm: str, times: overlap._Times) -> None:
        asked[0] = 0
        measure(bench, arm, times)
        stage, onboard = times.busy[arm][-1]
        seen.setdefault(arm, set()).add((stage > 0, onboard > 0, asked[0]))

    monkeypatch.setattr(overlap.CacheManager, "wait_for_layer", waits)
    monkeypatch.setattr(overlap._Bench, "measure", measures)
    figures = list(overlap.figures(tmp_path, rounds=2, tokens=128))
    assert seen["device"] == {(False, False, 0)}
    assert seen["whole"] == {(False, True, 0)}
    assert seen["layers"] == {(False, True, 16)}, "each layer is waited for"
    assert seen["disk"] == {(True, True, 0)}
    assert len({figure.name for figure in figures}) == 5
    assert not os.listdir(tmp_path), "the store went"
