"""What the benchmarks that ask several vLLM engines by turns share: the engines, and what is made of their answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narrow
import numpy as np

__all__ = [
    *("BLOCK", "NOT_STARTED", "Arm", "all_of", "bounds", "by_turns", "compare", "difference", "kvtier", "plan"),
    *("throttle", "words"),
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PATIENCE = 600.0  # seconds for an answer, after which an engine counts as dead
FAREWELL = 60.0  # seconds for an engine to end by itself
NOT_STARTED = "not started"
BLOCK = 64  # tokens, of engines without a GPU


@dataclass
class Arm:
    """One engine. ``connector`` is vLLM's ``--kv-transfer-config``; None: none."""

    name: str
    connector: dict[str, Any] | None
    environment: dict[str, str] = field(default_factory=dict)
    restarts: bool = False  # begins with what an engine before it has left on disk
    leaves: Path | None = None  # shared memory that one of its processes would leave behind when killed
    process: subprocess.Popen[str] | None = None
    log: Path = Path()
    about: str = NOT_STARTED
    asked: defaultdict[str, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    """Results by case and prompt."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)

    def start(self, plan: dict[str, Any], log: Path) -> None:
        """Begin to build the engine; see :meth:`ready`."""
        self.log = log
        options = plan | ({"kv_transfer_config": self.connector} if self.connector else {})
        path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "arm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,  # whoever stops the benchmark stops it alone, and it stops these
            env=os.environ | {"PYTHONPATH": path} | self.environment,
        )
        self._send(options)

    def ready(self) -> bool:
        """Wait for the engine that was started; `about` says why there is none."""
        up = self._answer("did not start") is not None
        self.about = "ran" if up else self.about
        return up

    def ask(self, case: str, number: int, tokens: list[int], answer: int) -> list[int]:
        """Ask for ``answer`` tokens and keep what arm.py tells of it under ``case``; returns the tokens. An engine that
        has died is left out from then on, and `about` says so."""
        given = self.ask_at_once(case, number, [tokens], answer)
        return given[0] if given else []

    def ask_at_once(self, case: str, first: int, prompts: list[list[int]], answer: int) -> list[list[int]]:
        """The same for prompts that come at the same moment, numbered from ``first``."""
        self._send({"ask": prompts, "answer": answer})
        results = self._answer(f"died in {case}") or []
        self.asked[case].update(enumerate(results, first))
        return [result["tokens"] for result in results]

    def metrics(self) -> dict[str, float]:
        self._send({"metrics": True})
        told: dict[str, float] = self._answer("died") or {}
        return told

    @property
    def lives(self) -> bool:
        return self.process is not None

    def stop(self) -> None:
        """End the engine and all that it started, whatever state they are in."""
        process, self.process = self.process, None
        if process is None:
            return
        self._send({"stop": True}, process)
        hears = self.about != NOT_STARTED  # one that is still being built does not
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(timeout=FAREWELL if hears else 0.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self.leaves is not None:
            self.leaves.unlink(missing_ok=True)

    def _send(self, order: dict[str, Any], process: subprocess.Popen[str] | None = None) -> None:
        process = process or self.process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # there will be no answer, and that says why
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()

    def _answer(self, otherwise: str) -> Any:
        """One line; None: there is none, and the engine is ended."""
        if self.process is None or self.process.stdout is None:
            return None
        came, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if came else ""
        if line:
            return json.loads(line)
        self.stop()
        self.about = f"{otherwise}: {_reason(self.log) if came else f'no answer in {PATIENCE:g} s'}"
        return None


def _reason(log: Path) -> str:
    """The last line of a log that names an error; those in which vLLM only says that there was one come after it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    lines = [line for line in lines if "root cause" not in line] or lines
    return lines[-1][-300:] if lines else f"see {log}"


def plan(dtype: str, longest: int, at_once: int = 1) -> dict[str, Any]:
    """What an engine without a GPU is told, so that it has room for ``at_once`` requests of so many tokens."""
    blocks = -(-longest // BLOCK)
    return {
        "dtype": dtype, "block_size": BLOCK, "num_gpu_blocks_override": at_once * blocks + 2,
        "max_model_len": (blocks + 1) * BLOCK, "max_num_seqs": at_once, "enforce_eager": True,
    }  # fmt: skip


def kvtier(
    extra: dict[str, Any],
    model: str | None,
    connector: str = "KVTierConnector",
    module: str = "kvtier.connectors.vllm",
) -> dict[str, Any]:
    """kvtier as an arm's connector, configured by ``extra``."""
    revision = {"weights_revision": narrow.REVISION} if model == "narrow" else {}
    return {
        "kv_connector": connector, "kv_connector_module_path": module, "kv_role": "kv_both",
        "kv_connector_extra_config": extra | revision,
    }  # fmt: skip


def words(seed: str, count: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(100, 40000) for _ in range(count)]


def throttle(file: Path, megabytes: float) -> None:
    """Make the disks of the arms whose bad_disk.py looks at ``file`` as slow as so many MB/s; 0: not at all."""
    file.with_suffix(".new").write_text(json.dumps({"bytes_per_s": 1e6 * megabytes}))
    file.with_suffix(".new").rename(file)


def by_turns(running: list[Arm], number: int) -> list[Arm]:
    """Those that live, in an order drawn for each prompt, so that none always follows the same other."""
    return random.Random(number).sample([arm for arm in running if arm.lives], sum(arm.lives for arm in running))


def all_of(arm: Arm, case: str, what: str) -> list[float]:
    return [result[what] for result in arm.asked[case].values()]


def compare(ours: dict[int, Any], theirs: dict[int, Any], what: str) -> dict[str, Any]:
    """The median of ours over theirs, pair by pair, of the prompts that both answered, and its bounds."""
    ratios = [ours[number][what] / theirs[number][what] for number in ours.keys() & theirs.keys()]
    return {
        "n": len(ratios),
        "ratio": statistics.median(ratios) if ratios else None,
        "bounds": list(bounds(ratios)) if ratios else None,
    }


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What counters grew by; what did not grow is left out."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value and "pages" not in name}


def bounds(values: list[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the median (Efron 1979)."""
    sample = np.asarray(values)
    drawn = np.random.default_rng(seed).choice(sample, (resamples, len(sample)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
