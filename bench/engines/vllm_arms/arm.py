"""One vLLM engine in a process of its own: JSON lines in, JSON lines out, for `bench/engines/vllm.py`.

First line in: what to build. Then ``{"ask": tokens, "answer": n}``, ``{"metrics": true}``, ``{"stop": true}``. Each
gets one line back; what vLLM says goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psutil

AFTER = 0.1  # seconds in which what was computed is still being stored
HITS = "vllm:prompt_tokens_cached_by_source"
KVTIER = "vllm:kvtier_"


def build(plan: dict[str, Any]) -> Any:
    from vllm import LLM

    from kvtier.lab.smollm2 import packaged_model

    return LLM(model=plan.pop("model") or str(packaged_model()), seed=0, disable_log_stats=False, **plan)


def ask(llm: Any, tokens: list[int], answer: int) -> dict[str, Any]:
    """TTFT and TPOT as vLLM itself took them: to the first token at the front end, and between tokens in the core.
    ``cpu``: what all of the engine's processes took for it, what they did in the moment after included."""
    from vllm import SamplingParams

    began = cpu()
    sampling = SamplingParams(temperature=0, max_tokens=answer, min_tokens=answer, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    times = output.metrics
    given = list(output.outputs[0].token_ids)
    tpot = (times.last_token_ts - times.first_token_ts) / (len(given) - 1) if len(given) > 1 else None
    time.sleep(AFTER)
    return {
        "ttft": times.first_token_latency,
        "tpot": tpot,
        "cpu": cpu() - began,
        "tokens": given,
        "cached": output.num_cached_tokens,
    }


def cpu() -> float:
    """Seconds of processor time of this process and all below it that live."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


def metrics(llm: Any) -> dict[str, float]:
    """Prompt tokens by where their KV came from, and the connector's own counters."""
    found = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value") and metric.name.startswith((HITS, KVTIER)):
            labels = [value for key, value in metric.labels.items() if key not in ("model_name", "engine")]
            found[":".join([metric.name.removeprefix("vllm:"), *labels])] = metric.value
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what others print must not be taken for an answer
    os.dup2(2, 1)
    llm = build(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "stop" in order:
            llm.llm_engine.engine_core.shutdown()
            break
        result = ask(llm, order["ask"], order["answer"]) if "ask" in order else metrics(llm)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
