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
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where another file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

from arms import bounds, by_turns, compare
from record import Record, common_options
from speeds import AtSpeeds, case, told

AHEAD = 0.6  # share of host memory for what is brought ahead: of documents, two while one is read


class Queues(AtSpeeds):
    def __init__(self, options: argparse.Namespace) -> None:
        engines = {"kvtier": {"prefetch.share": AHEAD}, "no look-ahead": {"prefetch.share": 0.0}}
        super().__init__(options, engines, documents=2 * options.waiting, fill=1, host=4)

    def at_one_speed(self, speed: float, record: Record) -> None:
        """The engine without a connector, which computes everything, is asked in the first round only."""
        waiting = self.options.waiting
        for number in range(2 * self.options.rounds):
            first = waiting * (number % 2)
            for arm in by_turns(self.arms, number):
                if arm.name != "none" or number < 2:
                    at_once = self.documents[first : first + waiting]
                    arm.ask_at_once(case(speed), number * waiting, at_once, self.options.answer)
            record.keep()

    def counts(self, number: int) -> bool:
        """The first of each half does not wait: it finds an engine that does nothing else."""
        return bool(number % self.options.waiting)

    def row(self, speed: float) -> dict[str, Any]:
        """Of those that waited."""
        ttft = {
            arm.name: {number: result for number, result in arm.asked[case(speed)].items() if self.counts(number)}
            for arm in self.arms
        }
        both = ttft["kvtier"].keys() & ttft["none"].keys()
        return {
            "disk_mb_per_s": speed or None,
            "ttft_ms_p50": {
                name: 1e3 * statistics.median(result["ttft"] for result in results.values())
                for name, results in ttft.items()
            },
            "ttft_ms_p50_bounds": {
                name: [1e3 * bound for bound in bounds([result["ttft"] for result in results.values()])]
                for name, results in ttft.items()
            },
            "to_no_look_ahead": compare(ttft["kvtier"], ttft["no look-ahead"], "ttft"),
            "to_none": compare(ttft["kvtier"], ttft["none"], "ttft"),
            "same_answers": sum(ttft["kvtier"][n]["tokens"] == ttft["none"][n]["tokens"] for n in both),
            "counted": self.counted.get(speed, {}),
        }

    def line(self, row: dict[str, Any]) -> str:
        compared = row["to_no_look_ahead"]
        low, high = compared["bounds"]
        return (
            f"{told(row)}; with to without look-ahead {compared['ratio']:.3f} ({low:.3f}–{high:.3f}), "
            f"n {compared['n']}, same answers {row['same_answers']}"
        )

    def found(self) -> dict[str, Any]:
        times = {
            arm.name: {
                case(speed): {number: result["ttft"] for number, result in arm.asked[case(speed)].items()}
                for speed in self.asked
            }
            for arm in self.arms
        }
        return super().found() | {"ttft_s": times}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, "out/vllm-queue.json")
    parser.add_argument("--waiting", type=int, default=4, help="prompts that come at once")
    parser.add_argument("--rounds", type=int, default=3, help="how often each half is asked at each speed")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0, 1000, 200], help="MB/s; 0: not throttled")
    options = parser.parse_args()
    if options.waiting < 2:
        parser.error(f"--waiting: {options.waiting}; accepted: 2 or more, of which all but one wait")
    return options


def main() -> None:
    Queues(parse()).run("kvtier.vllm-queue/1")


if __name__ == "__main__":
    main()
