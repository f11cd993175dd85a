"""`bench/engines` without vLLM: what is said of an arm that did not work, what one leaves behind, what is metered."""

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "bench/engines"


def load(name: str) -> ModuleType:
    """A benchmark; one has vLLM's name, and what they put on the path is for themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path.copy())
        spec = importlib.util.spec_from_file_location(f"bench_engines_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load("vllm")


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    return load("vllm_step")


@pytest.mark.parametrize(
    ("connector", "cached", "nothing"),
    [({"kv_connector": "any"}, [0, 0], True), ({"kv_connector": "any"}, [0, 64], False), (None, [0, 0], False)],
)
def test_a_connector_that_kept_nothing_is_no_result(bench, connector, cached, nothing) -> None:
    arm = bench.Arm("any", connector, about="ran")
    assert bench.told(arm) == "ran"
    arm.asked["evicted"] = {number: {"cached": tokens} for number, tokens in enumerate(cached)}
    assert ("kept nothing" in bench.told(arm)) == nothing


def test_a_death_is_told_by_its_cause(bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("begin\nConnectionError: the server exited\nRuntimeError: Engine failed. See root cause above.\n")
    arm = bench.Arm("any", None, log=log)
    arm.process = _engine("raise SystemExit(1)")
    assert not arm.ready()
    assert not arm.lives
    assert arm.about == "did not start: ConnectionError: the server exited"


def test_shared_memory_goes_with_the_engine(bench, tmp_path: Path) -> None:
    arm = bench.Arm("any", None, leaves=tmp_path / "pool")
    arm.leaves.touch()
    arm.process = _engine("input()")
    arm.stop()
    assert not arm.leaves.exists()


def test_lmcache_has_what_the_other_arms_have(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arm = bench.lmcache(False, 512 << 20, 64)
    assert arm.about == "not installed"
    extra = arm.connector["kv_connector_extra_config"]
    words = shlex.split(extra["lmcache.mp.autostart.server_args"])
    assert words[words.index("--l1-size-gb") + 1] == "0.5"
    assert words[words.index("--chunk-size") + 1] == "64"
    assert words[words.index("--http-port") + 1] != str(extra["lmcache.mp.port"])
    assert arm.leaves.name == words[words.index("--shm-name") + 1]


def at_speeds(name: str, **options: object) -> Any:
    """A run over a throttled disk that has not begun."""
    module = load(name)
    (kind,) = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, module.AtSpeeds)
               and each is not module.AtSpeeds)  # fmt: skip
    usual = {"tokens": 100, "answer": 8, "waiting": 2, "documents": 4, "dtype": "float32", "model": "narrow"}
    return kind(argparse.Namespace(**usual | {"speeds": [0.0, 10.0]} | options))


ANSWER = {"ttft": 0.5, "tokens": [1]}


@pytest.mark.parametrize("name", ["vllm_queue", "vllm_slow_disk"])
@pytest.mark.parametrize("answered", [[], [0], [1], [0, 1, 2, 3]])
def test_a_run_one_of_whose_engines_died_tells_which_and_why(bench, name: str, answered: list[int]) -> None:
    run = at_speeds(name)
    names = ["none", *run.engines]
    run.arms = [bench.Arm(arm, None, about="ran") for arm in names]
    for arm in run.arms:
        arm.asked["0 MB/s"] = dict.fromkeys(range(4), ANSWER)
        arm.asked["10 MB/s"] = dict.fromkeys(range(4), ANSWER)
    run.arms[1].asked["10 MB/s"] = dict.fromkeys(answered, ANSWER)
    run.arms[1].about = "died in 10 MB/s: OSError: no disk"
    assert run.said(0.0).startswith("not throttled: none 500 ms")
    told = run.said(10.0)
    compared = [number for number in answered if run.counts(number)]
    if compared:
        assert f"n {len(compared)}" in told
    else:
        assert (
            told
            == f"10 MB/s: nothing that all answered; none ran; {names[1]} died in 10 MB/s: OSError: no disk; "
            + (f"{names[2]} ran")
        )
    found = run.found()
    assert len(found["rows"]) == 1 + bool(compared)
    assert found["arms"][names[1]] == "died in 10 MB/s: OSError: no disk"
    json.dumps(found)


def test_a_queue_in_which_nobody_waits_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_queue", "--waiting", "1"])
    with pytest.raises(SystemExit):
        load("vllm_queue").parse()
    assert "--waiting: 1; accepted: 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vllm_queue", "vllm_slow_disk"])
def test_engines_over_a_throttled_disk_are_alike_but_for_what_they_are_told(name: str, tmp_path: Path) -> None:
    none, *others = at_speeds(name)._arms(tmp_path, tmp_path / "speed.json")
    assert none.connector is None
    extra = [arm.connector["kv_connector_extra_config"] for arm in others]
    assert len({each["host.size"] for each in extra}) == len({each["disk.size"] for each in extra}) == 1
    assert len({each["disk.path"] for each in extra}) == len(others) == 2
    assert all(each["weights_revision"] for each in extra)
    assert {arm.connector["kv_connector"] for arm in others} == {"BadDisk"}


def test_a_meter_tells_each_call_once_while_it_runs(steps, tmp_path: Path) -> None:
    class Called:
        def outer(self) -> str:
            return self.inner() + "!"

        def inner(self) -> str:
            return "done"

        def fails(self) -> None:
            raise KeyError

        def never(self) -> None:
            pass

        def _private(self) -> None:
            pass

    assert steps.meter.public(Called) == ["outer", "inner", "fails", "never"]
    meter, called = steps.meter.Meter(tmp_path / "worker", steps.meter.public(Called)), Called()
    for number, name in enumerate(steps.meter.public(Called)):
        setattr(called, name, meter.around(number, getattr(called, name)))
    assert called.outer() == "done!"
    with pytest.raises(KeyError):
        called.fails()
    assert called.inner() == "done"
    told = steps.spent(tmp_path)
    assert {name: spent.calls for name, spent in told.items()} == {
        "worker:outer": 1, "worker:fails": 1, "worker:inner": 1,
    }  # fmt: skip
    assert all(spent.seconds > 0 for spent in told.values())


def test_a_steps_calls_are_told_beside_what_metering_them_takes(steps) -> None:
    spent = steps.meter.Spent
    calls = {steps.STEP: spent(2e-3, 10), steps.EMPTY: spent(1e-3, 100), "worker:get_finished": spent(0.0, 0)}
    made = steps.row("any", 1, [{"cpu_s": 0.3, "calls": calls}, {"cpu_s": 0.6, "calls": calls}])
    assert made["steps"] == [10, 10]
    assert made["calls_us_a_step_p50"] == pytest.approx(300)
    assert made["meter_us_a_step"] == pytest.approx(110)  # 11 calls of 10 us
    assert made["share_p50"] == pytest.approx(0.0075)
    assert list(made["us_a_step_by_call"]) == [steps.STEP, steps.EMPTY]


def _engine(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
