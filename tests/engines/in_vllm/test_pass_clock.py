"""How long a pass took, by the clock of what computes it."""

import itertools
import time

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

import torch

from kvtier.connectors.vllm.pass_clock import PassClock


def test_a_pass_on_a_gpu_is_timed_when_the_gpu_has_come_to_its_end():
    clock = itertools.count(1)
    come = [0]

    class Mark:
        def record(self):
            self.at = next(clock)

        def query(self):
            return self.at <= come[0]

        def elapsed_time(self, end):
            return 1000.0 * (end.at - self.at)

    passes = PassClock(torch.device("cuda", 0), Mark)
    passes.begin(7)
    passes.end()
    passes.begin(0)
    passes.end()
    passes.begin(8)
    assert passes.take() == {}, "nobody waits for it"
    come[0] = 2
    assert passes.take() == {7: 1.0}
    passes.end()
    passes.end()
    come[0] = 9
    assert passes.take() == {8: 1.0}
    assert passes.take() == {}
    for number in range(1, 40):
        passes.begin(number)
        passes.end()
    come[0] = 1000
    assert sorted(passes.take()) == list(range(24, 40)), "of a device that does not answer nothing piles up"


def test_where_a_call_returns_when_its_pass_is_computed_the_call_is_timed():
    passes = PassClock(torch.device("cpu"))
    passes.begin(3)
    before = time.perf_counter()
    while time.perf_counter() - before < 0.02:
        pass
    passes.end()
    (seconds,) = passes.take().values()
    assert seconds >= 0.02
