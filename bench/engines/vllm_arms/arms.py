"""What the benchmarks that ask several vLLM engines by turns share: the engines, and what is made of their answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Arm", "bounds", "by_turns", "difference", "words"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@dataclass
class Arm:
    """One engine. ``connector`` is vLLM's ``--kv-transfer-config``; None: none."""

    name: str
    connector: dict[str, Any] | None
    environment: dict[str, str] = field(default_factory=dict)
    restarts: bool = False  # begins with what an engine before it has left on disk
    process: subprocess.Popen[str] | None = None
    log: Path = Path()
    about: str = "ran"
    asked: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
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
            env=os.environ | {"PYTHONPATH": path} | self.environment,
        )
        self._send(options)

    def ready(self) -> bool:
        """Wait for the engine that was started; `about` says why there is none."""
        try:
            self._answer()
        except RuntimeError as error:
            self.about = f"did not start: {error}"
            self.stop()
        return self.process is not None

    def _send(self, order: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # there will be no answer, and that says why
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(_reason(self.log))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _say(self, order: dict[str, Any]) -> dict[str, Any]:
        self._send(order)
        return self._answer()

    def ask(self, tokens: list[int], answer: int) -> dict[str, Any]:
        """See arm.py for what is told of one request."""
        return self._say({"ask": tokens, "answer": answer})

    def metrics(self) -> dict[str, float]:
        return self._say({"metrics": True})

    def stop(self) -> None:
        if self.process is None:
            return
        self._send({"stop": True})
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.process = None


def _reason(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else f"see {log}"


def words(seed: str, count: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(100, 40000) for _ in range(count)]


def by_turns(running: list[Arm], number: int) -> list[Arm]:
    """The arms in an order drawn for each prompt, so that none always follows the same other."""
    return random.Random(number).sample(running, len(running))


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
