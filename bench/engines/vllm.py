"""kvtier inside vLLM beside vLLM alone, vLLM's own offloading and LMCache, in one run.

    python bench/engines/vllm.py --quick --out out/vllm.json

Each arm is a whole engine in a process of its own, with the same weights, the same device blocks and the same prompts.
All are up at the same time and are asked by turns, one request at a time, the order changing from prompt to prompt.

Long documents: every document is asked once (``first``), once more after others have pushed it out of the device's
blocks (``evicted``), and at once again (``device``). An arm that was restarted on a full disk finds its
``first`` there. Chat: some users by turns, each round's prompt being all that was said before and a new question
(``chat``; first rounds, where there is nothing to find, are left out). Steps: short prompts and longer answers, in
which nothing is stored or found, so that what a connector costs in each step is seen.

The file has each request's figures beside medians, their bounds and the aims. It is written anew after each prompt;
on SIGTERM the run ends with what it has. An engine that dies is left out from then on.

LMCache needs no place in vLLM's environment: ``pip install --no-deps --target FOLDER lmcache==0.5.6``, and FOLDER in
PYTHONPATH. Its usage reports are switched off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where this file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

import narrow
from arms import NOT_STARTED, Arm, all_of, bounds, by_turns, compare, difference, kvtier, words
from lmcache_arm import lmcache
from record import Record, common_options, ended

from kvtier.lab.measure import percentiles

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = {"cpu": 64, "gpu": 16}
CASES = ("first", "evicted", "device", "steps", "chat")
STEPS = 24  # tokens of an answer in which the cost of a step is looked at
LATER = 3  # documents, which fill the device's blocks, after which one is asked again
QUESTION = 24  # tokens that follow a document or are said in a round of chat
ARMS = {
    "none": "vLLM without a connector, which the others are compared with",
    "kvtier-host": "kvtier, host memory",
    "kvtier-disk": "kvtier, host memory and disk, restarted with the documents on disk",
    "vllm-offloading": "vLLM's OffloadingConnector; without a GPU with the copying worker of vllm_arms/memcpy_spec.py",
    "vllm-fs": "the same with vLLM's file system tier below it, restarted with the documents in it",
    "lmcache": "LMCache in host memory, with a server of its own, where it is installed",
}


def arms(chosen: set[str], gpu: bool, host: int, folder: Path, block: int, model: str | None) -> list[Arm]:
    """Who runs here. Those that cannot are in the list too, with the reason."""
    ours = {"host.size": host}
    disk = ours | {"disk.path": f"{folder}/kvtier", "disk.size": 2 * host}
    theirs = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    native = {"cpu_bytes_to_use": host}
    tiers = native | {
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": f"{folder}/fs"}],
    }
    if not gpu:
        native |= {"spec_name": "MemcpySpec", "spec_module_path": "memcpy_spec"}
        tiers |= {"spec_name": "MemcpyTieringSpec", "spec_module_path": "memcpy_spec"}
    found = [
        Arm("none", None),
        Arm("kvtier-host", kvtier(ours, model)),
        Arm("kvtier-disk", kvtier(disk, model), restarts=True),
        Arm("vllm-offloading", theirs | {"kv_connector_extra_config": native}),
        Arm("vllm-fs", theirs | {"kv_connector_extra_config": tiers}, restarts=True),
    ]
    return [arm for arm in [*found, lmcache(gpu, host, block)] if arm.name in chosen]


class Comparison:
    """One run: the arms, what they are asked, and what came of it so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.gpu = options.device == "gpu"
        self.block = BLOCK[options.device]
        longest = max(options.tokens, options.opening + options.rounds * (QUESTION + options.answer)) + options.answer
        self.blocks = 2 * -(-longest // self.block) + 2
        self.plan = {
            "dtype": options.dtype, "block_size": self.block,
            "num_gpu_blocks_override": self.blocks, "max_model_len": (longest // self.block + 1) * self.block,
            "max_num_seqs": 4, "enforce_eager": not self.gpu,
        }  # fmt: skip
        self.documents = [words(f"document {n}", options.tokens) for n in range(options.documents)]
        self.arms: list[Arm] = []

    def measure(self, record: Record) -> None:
        with tempfile.TemporaryDirectory(dir=self.options.disk) as folder:
            (Path(folder) / "kvtier").mkdir()
            self.plan |= narrow.options(self.options.model, Path(folder))
            chosen = {"none", *self.options.arms}
            self.arms += arms(chosen, self.gpu, self.options.host, Path(folder), self.block, self.options.model)
            try:
                for arm in self.arms:
                    if arm.restarts:
                        self.fill(arm, record.logs)
                for arm in self.arms:
                    if arm.about == NOT_STARTED:  # one after the other, since each looks at how much memory is free
                        arm.start(self.plan, record.logs / f"{arm.name}.log")
                        arm.ready()
                self.ask(record)
            finally:
                for arm in self.arms:
                    arm.stop()

    def fill(self, arm: Arm, logs: Path) -> None:
        """Have the documents computed and written by an engine, that is then shut down."""
        if arm.about != NOT_STARTED:
            return
        first = Arm(arm.name, arm.connector, arm.environment)
        try:
            first.start(self.plan, logs / f"{arm.name}-fill.log")
            first.ready()
            for number, document in enumerate(self.documents):
                first.ask("fill", number, document, 1)
            first.ask("end", 0, words("something else", 64), 16)  # steps in which what is being written gets on
        finally:
            first.stop()
        if first.about != "ran":
            arm.about = first.about

    def ask(self, record: Record) -> None:
        for arm in by_turns(self.arms, 0):
            arm.ask("warm up", 0, words("warm up", self.options.tokens), self.options.answer)
        end = time.monotonic() + 60 * self.options.minutes
        self.counted("documents", lambda: self.long_documents(record, end))
        if "steps" in self.options.cases:
            self.counted("steps", lambda: self.steps(record))
        if "chat" in self.options.cases:
            self.counted("chat", lambda: self.chat(record))

    def counted(self, name: str, part: Callable[[], None]) -> None:
        before = {arm.name: arm.metrics() for arm in self.arms}
        part()
        for arm in self.arms:
            if arm.lives:
                arm.sources[name] = difference(arm.metrics(), before[arm.name])

    def long_documents(self, record: Record, end: float) -> None:
        """Each document once and, when LATER others have been asked, twice more; no more begins after ``end``."""
        again, answer = "evicted" in self.options.cases, self.options.answer
        for number in range(len(self.documents) + LATER * again):
            if number < len(self.documents) and time.monotonic() < end:
                for arm in by_turns(self.arms, number):
                    arm.ask("first", number, self.documents[number], answer)
            if again and number >= LATER and time.monotonic() < end:
                for arm in by_turns(self.arms, -number):
                    for case in ("evicted", "device"):
                        arm.ask(case, number - LATER, self.documents[number - LATER], answer)
            record.keep()

    def steps(self, record: Record) -> None:
        """Prompts too short to be kept and some steps behind each, in which nothing moves: what a step costs."""
        for number in range(self.options.documents):
            for arm in by_turns(self.arms, number):
                arm.ask("steps", number, words(f"steps {number}", QUESTION), STEPS)
            record.keep()

    def chat(self, record: Record) -> None:
        answer = self.options.answer
        said = {
            (arm.name, user): words(f"opening {user}", self.options.opening)
            for arm in self.arms
            for user in range(self.options.users)
        }
        for turn in range(self.options.rounds):
            for user in range(self.options.users):
                number = turn * self.options.users + user
                for arm in by_turns(self.arms, number):
                    history = said[arm.name, user]
                    history += words(f"question {user} {turn}", QUESTION)
                    history += arm.ask("chat" if turn else "opening", number, history, answer)
            record.keep()

    def found(self) -> dict[str, Any]:
        by_name = {arm.name: arm for arm in self.arms}
        return {
            "device_blocks": self.blocks,
            "block_size": self.block,
            "arms": {arm.name: f"{ARMS[arm.name]}: {told(arm)}" for arm in self.arms},
            "rows": [row(arm, case, by_name["none"]) for arm in self.arms for case in CASES if arm.asked[case]],
            "aims": [made for aim in AIMS if (made := aim.look(by_name)) is not None],
            "hits_by_source": {arm.name: arm.sources for arm in self.arms if arm.sources},
            "asked": {arm.name: {case: _times(results) for case, results in arm.asked.items()} for arm in self.arms},
        }


def told(arm: Arm) -> str:
    """What is to be said of it. A connector that keeps nothing makes vLLM compute: no error, and no result either."""
    evicted = arm.asked.get("evicted", {}).values()
    if arm.connector is not None and evicted and not any(result["cached"] for result in evicted):
        return f"{arm.about}, but kept nothing: every evicted document was computed again, see {arm.log}"
    return arm.about


def _times(results: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        number: {key: result[key] for key in ("ttft", "tpot", "cpu", "cached")} for number, result in results.items()
    }


@dataclass(frozen=True)
class Aim:
    """That the median of ours over theirs, prompt by prompt, is at most so much."""

    name: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    at_most: float
    what: str = "ttft"

    def look(self, arms: dict[str, Arm]) -> dict[str, Any] | None:
        """What was found; None: nothing was."""
        if self.ours[0] not in arms or self.theirs[0] not in arms:
            return None
        pair = [arms[arm].asked[case] for arm, case in (self.ours, self.theirs)]
        made = compare(*pair, self.what)
        if not made["n"]:
            return None
        sides = {"ours": "/".join(self.ours), "theirs": "/".join(self.theirs), "of": self.what}
        return {"aim": self.name, **sides, **made, "at_most": self.at_most, "met": made["ratio"] <= self.at_most}


AIMS = (
    Aim("host hit to vLLM's offloading", ("kvtier-host", "evicted"), ("vllm-offloading", "evicted"), 1.0),
    Aim("host hit to vLLM's prefix cache", ("kvtier-host", "evicted"), ("none", "device"), 1.25),
    Aim("disk hit to vLLM's file system tier", ("kvtier-disk", "first"), ("vllm-fs", "first"), 1.0),
    Aim("disk hit to vLLM's prefix cache", ("kvtier-disk", "first"), ("none", "device"), 1.5),
    Aim("a prompt without reuse", ("kvtier-host", "first"), ("none", "first"), 1.02, "cpu"),
    Aim("a step without reuse, host", ("kvtier-host", "steps"), ("none", "steps"), 1.02, "cpu"),
    Aim("a step without reuse, host and disk", ("kvtier-disk", "steps"), ("none", "steps"), 1.02, "cpu"),
)


def row(arm: Arm, case: str, plain: Arm) -> dict[str, Any]:
    """An arm in one case; ratios are of the same prompts, ours over that of the engine without a connector."""
    ours, theirs = arm.asked[case], plain.asked[case]
    ttft = all_of(arm, case, "ttft")
    both = ours.keys() & theirs.keys()
    return {
        "arm": arm.name,
        "case": case,
        "n": len(ours),
        "ttft_ms": percentiles(ttft),
        "ttft_ms_p50_bounds": [1e3 * bound for bound in bounds(ttft)],
        "tpot_ms": percentiles(tpot for tpot in all_of(arm, case, "tpot") if tpot is not None),
        "cpu_ms_p50": 1e3 * statistics.median(all_of(arm, case, "cpu")),
        "ttft_to_none": compare(ours, theirs, "ttft"),
        "cpu_to_none": compare(ours, theirs, "cpu"),
        "cached_tokens": sum(all_of(arm, case, "cached")),
        "same_answers": sum(ours[number]["tokens"] == theirs[number]["tokens"] for number in both),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':<16} {'case':<8} {'n':>3} {'TTFT p50 ms':>12} {'95 % bounds':>17} {'TPOT p50':>9} "
             f"{'CPU ms':>8} {'to none: TTFT':>14} {'CPU':>6} {'cached':>8} {'same':>7}"]  # fmt: skip
    for each in result["rows"]:
        low, high = each["ttft_ms_p50_bounds"]
        tpot, to_none = each["tpot_ms"]["p50"], [each[ratio]["ratio"] for ratio in ("ttft_to_none", "cpu_to_none")]
        ttft, cpu = (f"{ratio:.3f}" if ratio is not None else "–" for ratio in to_none)
        lines.append(
            f"{each['arm']:<16} {each['case']:<8} {each['n']:>3} {each['ttft_ms']['p50']:>12.1f} "
            f"{f'{low:.1f}–{high:.1f}':>17} {'–' if tpot is None else f'{tpot:.1f}':>9} {each['cpu_ms_p50']:>8.0f} "
            f"{ttft:>14} {cpu:>6} {each['cached_tokens']:>8} {each['same_answers']:>3}/{each['n']:<3}"
        )
    for aim in result["aims"]:
        low, high = aim["bounds"]
        lines.append(
            f"{'met' if aim['met'] else 'MISSED'}: {aim['aim']}: {aim['of']} {aim['ratio']:.3f} "
            f"({low:.3f}–{high:.3f}), n {aim['n']}; at most {aim['at_most']:g}"
        )
    lines += [f"{name}: {about}" for name, about in result["arms"].items()]
    lines.append(ended(result))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, "out/vllm.json")
    parser.add_argument("--quick", action="store_true", help="short prompts, few of them: about three idle minutes")
    parser.add_argument("--device", choices=sorted(BLOCK), default="cpu")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="none is always one of them")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, help="besides first; device goes with evicted"
    )
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=1e6, help="of documents, after which no other one is asked")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--opening", type=int, default=500, help="tokens that a chat begins with")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--host", type=int, default=1 << 30, help="bytes of host memory for each arm that uses any")
    options = parser.parse_args()
    if options.quick:
        options.documents, options.tokens = 6, 400
        options.users, options.rounds, options.opening, options.host = 4, 3, 260, 512 << 20
    return options


def main() -> None:
    options = parse()
    comparison = Comparison(options)
    print(table(Record("kvtier.vllm/2", options, comparison.found).run(comparison.measure)))


if __name__ == "__main__":
    main()
