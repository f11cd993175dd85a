"""What kvtier's calls take of a step in vLLM, by the clocks of the threads that make them.

    python bench/engines/vllm_step.py --out out/vllm-step.json

Two engines are up at the same time and asked by turns: with kvtier in host memory, and with a disk below it. Prompts
are short, nothing of them is found, and each stores no more than the blocks that its answer fills: what is left is what
a connector costs in each step. Each call that vLLM makes of the connector, in the scheduler and in the worker, is
metered (vllm_arms/meter.py); beside it stands what all of the engine's processes took for the same answers. The copies'
own threads are in the second figure only. Metering takes time itself, which is in the first: at least as much as is
seen of a call that does nothing.

The file has each answer's figures beside medians and their bounds, and is written anew after each; on SIGTERM the run
ends with what it has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where another file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

import meter
import narrow
from arms import Arm, bounds, by_turns, kvtier, plan, words
from record import Record, common_options, ended

STEP = "scheduler:build_connector_meta"  # vLLM calls it once in each step
EMPTY = "worker:save_kv_layer"  # does nothing: what is seen of it is what metering a call takes there
HOST = 256 << 20  # bytes


class Steps:
    """One run: the two engines, and what their calls took of each answer so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.arms: list[Arm] = []
        self.taken: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)

    def measure(self, record: Record) -> None:
        options = self.options
        with tempfile.TemporaryDirectory(dir=options.disk) as name:
            folder = Path(name)
            (folder / "kvtier").mkdir()
            disk = {"disk.path": f"{folder}/kvtier", "disk.size": 2 * HOST}
            for arm, extra in (("kvtier-host", {}), ("kvtier-disk", disk)):
                (folder / arm).mkdir()
                connector = kvtier({"host.size": HOST} | extra, options.model, "Metered", "metered")
                self.arms.append(Arm(arm, connector, {"METERED": str(folder / arm)}))
            whole = plan(options.dtype, options.tokens + options.answer, max(options.at_once))
            whole |= narrow.options(options.model, folder)
            try:
                for arm in self.arms:  # one after the other, since each looks at how much memory is free
                    arm.start(whole, record.logs / f"{options.out.stem}-{arm.name}.log")
                    if not arm.ready():
                        raise RuntimeError(f"{arm.name}: {arm.about}")
                    arm.ask("warm up", 0, words("warm up", options.tokens), options.answer)
                for number in range(options.rounds):
                    for count in options.at_once:
                        for arm in by_turns(self.arms, number):
                            self.ask(arm, number, count, folder / arm.name)
                        record.keep()
            finally:
                for arm in self.arms:
                    arm.stop()

    def ask(self, arm: Arm, number: int, count: int, meters: Path) -> None:
        prompts = [words(f"{count} at once, {number}.{n}", self.options.tokens) for n in range(count)]
        before = spent(meters)
        arm.ask_at_once(f"{count} at once", count * number, prompts, self.options.answer)
        if not arm.lives:
            return
        none = meter.Spent(0.0, 0)
        calls = {name: now.since(before.get(name, none)) for name, now in spent(meters).items()}
        cpu = arm.asked[f"{count} at once"][count * number]["cpu"]
        self.taken[arm.name, count].append({"cpu_s": cpu, "calls": calls})

    def found(self) -> dict[str, Any]:
        return {"rows": [row(name, count, taken) for (name, count), taken in self.taken.items()]}


def spent(folder: Path) -> dict[str, meter.Spent]:
    """By side and method, of one engine so far."""
    return {f"{file.name}:{name}": each for file in folder.iterdir() for name, each in meter.read(file).items()}


def row(arm: str, count: int, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one engine, asked for so many answers at once."""
    seconds = [sum(each.seconds for each in answer["calls"].values()) for answer in taken]
    steps = [answer["calls"][STEP].calls for answer in taken]
    a_step = [1e6 * took / made for took, made in zip(seconds, steps, strict=True)]
    shares = [took / answer["cpu_s"] for took, answer in zip(seconds, taken, strict=True)]
    by_call: defaultdict[str, meter.Spent] = defaultdict(lambda: meter.Spent(0.0, 0))
    for answer in taken:
        for name, each in answer["calls"].items():
            by_call[name] = by_call[name].and_also(each)
    of_the_meter = by_call[EMPTY].seconds / max(1, by_call[EMPTY].calls) * sum(each.calls for each in by_call.values())
    return {
        "arm": arm,
        "at_once": count,
        "n": len(taken),
        "steps": steps,
        "step_cpu_ms_p50": statistics.median(
            1e3 * answer["cpu_s"] / made for answer, made in zip(taken, steps, strict=True)
        ),
        "calls_us_a_step": a_step,
        "calls_us_a_step_p50": statistics.median(a_step),
        "calls_us_a_step_p50_bounds": list(bounds(a_step)),
        "meter_us_a_step": 1e6 * of_the_meter / sum(steps),
        "share_p50": statistics.median(shares),
        "share_p50_bounds": list(bounds(shares)),
        "us_a_step_by_call": {
            name: 1e6 * each.seconds / sum(steps)
            for name, each in sorted(by_call.items(), key=lambda item: -item[1].seconds)
            if each.calls
        },
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':<12} {'at once':>7} {'n':>3} {'CPU a step, ms':>14} {'calls, us':>10} {'95 % bounds':>15} "
             f"{'of the meter':>13} {'share':>7} {'95 % bounds':>15}"]  # fmt: skip
    for each in result["rows"]:
        us, share = each["calls_us_a_step_p50_bounds"], [100 * bound for bound in each["share_p50_bounds"]]
        lines.append(
            f"{each['arm']:<12} {each['at_once']:>7} {each['n']:>3} {each['step_cpu_ms_p50']:>14.1f} "
            f"{each['calls_us_a_step_p50']:>10.0f} {f'{us[0]:.0f}–{us[1]:.0f}':>15} "
            f"{each['meter_us_a_step']:>13.0f} "
            f"{100 * each['share_p50']:>5.2f} % {f'{share[0]:.2f}–{share[1]:.2f} %':>15}"
        )
    return "\n".join([*lines, ended(result)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, "out/vllm-step.json")
    parser.set_defaults(tokens=24)
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer, a step each")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4], help="answers that run together")
    return parser.parse_args()


def main() -> None:
    options = parse()
    steps = Steps(options)
    print(table(Record("kvtier.vllm-step/1", options, steps.found).run(steps.measure)))


if __name__ == "__main__":
    main()
