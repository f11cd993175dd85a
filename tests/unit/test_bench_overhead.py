"""What a step costs is counted whole: no step is left out, and no call that an engine makes is past the meter."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.lab import overhead
from kvtier.lab.meter import CallMeter
from kvtier.lab.overhead import Spent

NAMES: set[str] = set()


class NamingMeter(CallMeter):
    """Also says what was asked for."""

    def __getattr__(self, name):
        NAMES.add(name)
        return super().__getattr__(name)


def test_every_step_counts_and_hints_are_among_what_does(monkeypatch, tmp_path):
    monkeypatch.setattr(overhead, "CallMeter", NamingMeter)
    monkeypatch.setattr(overhead, "_STEP_S", 1e-4)
    monkeypatch.setattr(overhead, "_WARM_UP", 10)
    monkeypatch.setattr(overhead, "_BATCH", 4)
    monkeypatch.setattr(overhead, "_PROMPT", 64)
    spent = overhead._run(tmp_path, 290, 0, saturated=True)
    assert len(spent.wall) == len(spent.cpu) == len(spent.entered) == 290
    assert spent.entered.sum() == 4 * 4, "some that entered are not counted"
    assert "expect" in NAMES


def test_what_a_request_adds_is_more_than_what_the_others_cost():
    cpu = np.array([1.0, 3.0, 4.0, 8.0])
    spent = Spent(cpu, cpu, np.array([0, 0, 1, 2]))
    assert spent.entering.tolist() == [False, False, True, True]
    assert spent.cpu_of_a_request == pytest.approx((2.0 + 6.0) / 3)


def test_the_figures_are_of_all_steps_first():
    cpu = np.array([1e-5, 1e-5, 1e-5, 4e-5])
    spent = Spent(2 * cpu, cpu, np.array([0, 0, 0, 1]))
    plain = {figure.name: figure for figure in overhead._plain(spent)}
    mean = plain["CPU in kvtier's calls, mean of all steps, no reuse"]
    assert (mean.value, mean.ratio) == (pytest.approx(17.5), pytest.approx(17.5e-4))
    assert plain["CPU in kvtier's calls, mean step that decodes, no reuse"].value == pytest.approx(10)
    assert plain["CPU in kvtier's calls, what a request that enters adds, no reuse"].value == pytest.approx(30)
    busy = {figure.name: figure.value for figure in overhead._saturated(spent)}
    assert busy["wall in kvtier's calls, p99 of all steps, saturated"] > 70
    assert busy["CPU in kvtier's calls, p99 of steps that decode, saturated"] == pytest.approx(10)
