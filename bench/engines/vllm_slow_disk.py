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
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where another file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

from arms import bounds, by_turns
from record import Record, common_options
from speeds import AtSpeeds, case, told

AT_MOST = 1.10


class Circle(AtSpeeds):
    def __init__(self, options: argparse.Namespace) -> None:
        policies = {"kvtier": "cost", "always": "always"}
        engines = {name: {"load_policy": policy, "load_timeout_seconds": 60.0} for name, policy in policies.items()}
        super().__init__(options, engines, documents=options.documents, fill=options.answer, host=2)

    def at_one_speed(self, speed: float, record: Record) -> None:
        for number in range(self.options.rounds * len(self.documents)):
            for arm in by_turns(self.arms, number):
                prompt = self.documents[number % len(self.documents)]
                arm.ask(case(speed), number, prompt, self.options.answer)
            record.keep()

    def row(self, speed: float) -> dict[str, Any]:
        asked = {arm.name: arm.asked[case(speed)] for arm in self.arms}
        whole = sorted(self._common(speed))
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

    def line(self, row: dict[str, Any]) -> str:
        low, high = row["to_the_faster_bounds"]
        return (
            f"{told(row)}; kvtier to the faster of the others {row['to_the_faster']:.3f} ({low:.3f}–{high:.3f}; "
            f"{'met' if row['met'] else 'MISSED'}), n {row['n']}, same answers {row['same_answers']}"
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
    Circle(parse()).run("kvtier.vllm-slow-disk/2")


if __name__ == "__main__":
    main()
