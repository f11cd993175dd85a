"""What a look-ahead is worth in vLLM: prompts whose KV is on disk come at once, and all but one have to wait.

    python bench/engines/vllm_queue.py --model narrow --dtype bfloat16 --threads 2 --out out/vllm-queue.json

Three engines are up at the same time: without a connector, with kvtier, and with kvtier told to look at nobody who
waits (``prefetch.share`` 0). Each serves one request at a time. Documents are asked in two halves by turns, a half at
once; host memory holds half of one of them and what is brought ahead, so that each comes from disk again. Asked of each
request: its TTFT from when it came, so that what the ones before it took is in it.

The file has each request's figures too and is written anew after each half; on SIGTERM the run ends with what it has.
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
from arms import Arm, bounds, by_turns, compare, difference, throttle, words
from record import Record, common_options

BLOCK = 64
TOKEN_BYTES = 30 * 3 * 2 * 64 * 4  # of both models: layers, KV heads, K and V, head size, float32
AHEAD = 0.6  # share of host memory for what is brought ahead: of documents, two while one is read


def arms(folder: Path, host: int, size: int, model: str | None) -> list[Arm]:
    found = [Arm("none", None)]
    for name, share in (("kvtier", AHEAD), ("no look-ahead", 0.0)):
        path = folder / name
        path.mkdir()
        extra = {"host.size": host, "disk.path": str(path), "disk.size": size, "prefetch.share": share}
        if model == "narrow":
            extra["weights_revision"] = narrow.REVISION
        connector = {"kv_connector": "BadDisk", "kv_connector_module_path": "bad_disk", "kv_role": "kv_both"}
        arm = Arm(name, connector | {"kv_connector_extra_config": extra})
        arm.environment = {"BAD_DISK": str(folder / "speed.json")}
        found.append(arm)
    return found


class Queues:
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
        documents = [words(f"document {n}", options.tokens) for n in range(2 * options.waiting)]
        size = blocks * BLOCK * TOKEN_BYTES // (1 if options.dtype == "float32" else 2)
        with tempfile.TemporaryDirectory(dir=options.disk) as name:
            folder = Path(name)
            throttle(folder / "speed.json", 0)
            plan |= narrow.options(options.model, folder)
            self.arms += arms(folder, 4 * size, (len(documents) + 2) * size, options.model)
            try:
                for arm in self.arms:  # one after the other, since each looks at how much memory is free
                    arm.start(plan, record.logs / f"queue-{arm.name.replace(' ', '-')}.log")
                    if not arm.ready():
                        raise RuntimeError(f"{arm.name}: {arm.about}")
                for number, prompt in enumerate(documents):
                    for arm in by_turns(self.arms, number):
                        arm.ask("fill", number, prompt, 1)
                for speed in options.speeds:
                    throttle(folder / "speed.json", speed)
                    self.at_one_speed(documents, speed, record)
                    print(line(self.row(speed)), flush=True)
            finally:
                for arm in self.arms:
                    arm.stop()

    def at_one_speed(self, documents: list[list[int]], speed: float, record: Record) -> None:
        """The engine without a connector, which computes everything, is asked in the first round only."""
        waiting = self.options.waiting
        before = {arm.name: arm.metrics() for arm in self.arms}
        for number in range(2 * self.options.rounds):
            first = waiting * (number % 2)
            for arm in by_turns(self.arms, number):
                if arm.name != "none" or number < 2:
                    at_once = documents[first : first + waiting]
                    arm.ask_at_once(case(speed), number * waiting, at_once, self.options.answer)
            record.keep()
        self.counted[speed] = {arm.name: difference(arm.metrics(), before[arm.name]) for arm in self.arms}

    def row(self, speed: float) -> dict[str, Any]:
        """Of those that waited: the first of each half finds an engine that does nothing else."""
        ttft = {
            arm.name: {
                number: result for number, result in arm.asked[case(speed)].items() if number % self.options.waiting
            }
            for arm in self.arms
        }
        both = ttft["kvtier"].keys() & ttft["none"].keys()
        return {
            "disk_mb_per_s": speed or None,
            "ttft_ms_p50": {
                name: 1e3 * statistics.median(result["ttft"] for result in results.values()) if results else None
                for name, results in ttft.items()
            },
            "ttft_ms_p50_bounds": {
                name: [1e3 * bound for bound in bounds([result["ttft"] for result in results.values()])]
                for name, results in ttft.items()
                if results
            },
            "to_no_look_ahead": compare(ttft["kvtier"], ttft["no look-ahead"], "ttft"),
            "to_none": compare(ttft["kvtier"], ttft["none"], "ttft"),
            "same_answers": sum(ttft["kvtier"][n]["tokens"] == ttft["none"][n]["tokens"] for n in both),
            "counted": self.counted.get(speed, {}),
        }

    def found(self) -> dict[str, Any]:
        whole = [s for s in self.options.speeds if self.arms and all(arm.asked[case(s)] for arm in self.arms)]
        asked = {
            arm.name: {
                case(speed): {number: result["ttft"] for number, result in arm.asked[case(speed)].items()}
                for speed in whole
            }
            for arm in self.arms
        }
        return {"rows": [self.row(speed) for speed in whole], "block_size": BLOCK, "ttft_s": asked}


def case(speed: float) -> str:
    return f"{speed:g} MB/s"


def line(found: dict[str, Any]) -> str:
    speed = found["disk_mb_per_s"]
    medians = ", ".join(f"{name} {value:.0f} ms" for name, value in found["ttft_ms_p50"].items())
    compared = found["to_no_look_ahead"]
    low, high = compared["bounds"]
    return (
        f"{'not throttled' if speed is None else f'{speed:g} MB/s'}: {medians}; with to without look-ahead "
        f"{compared['ratio']:.3f} ({low:.3f}–{high:.3f}), n {compared['n']}, same answers {found['same_answers']}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, "out/vllm-queue.json")
    parser.add_argument("--waiting", type=int, default=4, help="prompts that come at once")
    parser.add_argument("--rounds", type=int, default=3, help="how often each half is asked at each speed")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0, 1000, 200], help="MB/s; 0: not throttled")
    return parser.parse_args()


def main() -> None:
    options = parse()
    queues = Queues(options)
    result = Record("kvtier.vllm-queue/1", options, queues.found).run(queues.measure)
    print(f"Ended {result['ended']} after {result['seconds']} s; load {result['load'][0]}, {result['load'][1]}.")


if __name__ == "__main__":
    main()
