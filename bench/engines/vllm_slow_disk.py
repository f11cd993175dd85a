"""Does kvtier ever make vLLM slower? Its disk throttled to several speeds, beside vLLM alone and beside loading always.

    python bench/engines/vllm_slow_disk.py --out out/vllm-slow-disk.json

Three engines are up at the same time and are asked for the same documents by turns: without a connector, with kvtier as
it decides, and with kvtier told to load always. Host memory holds two documents, so that the documents, asked in a
circle, come from disk each time. What may be aimed at is the faster of the other two, pair by pair; the first requests
at each speed are in it, from which the new speed is learnt.

The file has each request's figures too and is written anew after each prompt; on SIGTERM the run ends with what it has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where another file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

import narrow
from arms import Arm, bounds, by_turns, difference, throttle, words
from record import Record, common_options

BLOCK = 64
AT_MOST = 1.10
TOKEN_BYTES = (
    30 * 3 * 2 * 64 * 4
)  # of the default model and of the narrow one: layers, KV heads, K and V, head size, float32


def arms(folder: Path, host: int, size: int, model: str | None) -> list[Arm]:
    found = [Arm("none", None)]
    for name, policy in (("kvtier", "cost"), ("always", "always")):
        path = folder / name
        path.mkdir()
        extra = {"host.size": host, "disk.path": str(path), "disk.size": size, "load_policy": policy}
        extra["load_timeout_seconds"] = 60.0
        if model == "narrow":
            extra["weights_revision"] = narrow.REVISION
        connector = {"kv_connector": "BadDisk", "kv_connector_module_path": "bad_disk", "kv_role": "kv_both"}
        arm = Arm(name, connector | {"kv_connector_extra_config": extra})
        arm.environment = {"BAD_DISK": str(folder / "speed.json")}
        found.append(arm)
    return found


class Circle:
    """One run: the three engines, and what came of them at each speed so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.arms: list[Arm] = []
        self.counted: dict[float, dict[str, dict[str, float]]] = {}

    def measure(self, record: Record) -> None:
        options = self.options
        blocks = -(-(options.tokens + options.answer) // BLOCK)
        plan = {
            "dtype": options.dtype, "block_size": BLOCK, "num_gpu_blocks_override": blocks + 2,
            "max_model_len": (blocks + 1) * BLOCK, "max_num_seqs": 1, "enforce_eager": True,
        }  # fmt: skip
        documents = [words(f"document {n}", options.tokens) for n in range(options.documents)]
        size = blocks * BLOCK * TOKEN_BYTES // (1 if options.dtype == "float32" else 2)
        with tempfile.TemporaryDirectory(dir=options.disk) as name:
            folder = Path(name)
            throttle(folder / "speed.json", 0)
            plan |= narrow.options(options.model, folder)
            self.arms += arms(folder, 2 * size, (options.documents + 2) * size, options.model)
            try:
                for arm in self.arms:  # one after the other, since each looks at how much memory is free
                    arm.start(plan, record.logs / f"slow-{arm.name}.log")
                    if not arm.ready():
                        raise RuntimeError(f"{arm.name}: {arm.about}")
                for number, prompt in enumerate(documents):
                    for arm in by_turns(self.arms, number):
                        arm.ask("fill", number, prompt, options.answer)
                for speed in options.speeds:
                    throttle(folder / "speed.json", speed)
                    self.at_one_speed(documents, speed, record)
                    print(line(self.row(speed)), flush=True)
            finally:
                for arm in self.arms:
                    arm.stop()

    def at_one_speed(self, documents: list[list[int]], speed: float, record: Record) -> None:
        before = {arm.name: arm.metrics() for arm in self.arms}
        for number in range(self.options.rounds * len(documents)):
            for arm in by_turns(self.arms, number):
                arm.ask(case(speed), number, documents[number % len(documents)], self.options.answer)
            record.keep()
        self.counted[speed] = {arm.name: difference(arm.metrics(), before[arm.name]) for arm in self.arms}

    def row(self, speed: float) -> dict[str, Any]:
        asked = {arm.name: arm.asked[case(speed)] for arm in self.arms}
        whole = sorted(set.intersection(*(set(results) for results in asked.values())))
        ttft = {name: [results[number]["ttft"] for number in whole] for name, results in asked.items()}
        best = [min(pair) for pair in zip(ttft["none"], ttft["always"], strict=True)]
        ratios = [ours / other for ours, other in zip(ttft["kvtier"], best, strict=True)]
        return {
            "disk_mb_per_s": speed or None,
            "n": len(ratios),
            "ttft_ms_p50": {name: 1e3 * statistics.median(values) for name, values in ttft.items()},
            "ttft_ms": {name: [round(1e3 * value, 1) for value in values] for name, values in ttft.items()},
            "to_the_faster": statistics.median(ratios),
            "to_the_faster_bounds": list(bounds(ratios)),
            "at_most": AT_MOST,
            "met": statistics.median(ratios) <= AT_MOST,
            "same_answers": sum(asked["kvtier"][n]["tokens"] == asked["none"][n]["tokens"] for n in whole),
            "counted": self.counted.get(speed, {}),
        }

    def found(self) -> dict[str, Any]:
        whole = [s for s in self.options.speeds if self.arms and all(arm.asked[case(s)] for arm in self.arms)]
        return {"rows": [self.row(speed) for speed in whole], "block_size": BLOCK}


def case(speed: float) -> str:
    return f"{speed:g} MB/s"


def line(found: dict[str, Any]) -> str:
    low, high = found["to_the_faster_bounds"]
    speed = found["disk_mb_per_s"]
    medians = ", ".join(f"{name} {value:.0f} ms" for name, value in found["ttft_ms_p50"].items())
    return (
        f"{'not throttled' if speed is None else f'{speed:g} MB/s'}: {medians}; kvtier to the faster of the others "
        f"{found['to_the_faster']:.3f} ({low:.3f}–{high:.3f}; {'met' if found['met'] else 'MISSED'}), n {found['n']}, "
        f"same answers {found['same_answers']}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, "out/vllm-slow-disk.json")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="how often each document is asked at each speed")
    parser.add_argument("--answer", type=int, default=2, help="tokens of each answer")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0, 10, 200], help="MB/s; 0: not throttled")
    return parser.parse_args()


def main() -> None:
    options = parse()
    circle = Circle(options)
    result = Record("kvtier.vllm-slow-disk/2", options, circle.found).run(circle.measure)
    print(f"Ended {result['ended']} after {result['seconds']} s; load {result['load'][0]}, {result['load'][1]}.")


if __name__ == "__main__":
    main()
