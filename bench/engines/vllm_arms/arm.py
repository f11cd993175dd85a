"""One vLLM engine in a process of its own: JSON lines in, JSON lines out, for `bench/engines/vllm.py`.

First line in: what to build. Then ``{"ask": [tokens, …], "answer": n}``, prompts that come at once, ``{"metrics":
true}``, ``{"stop": true}``. Each gets one line back; what vLLM says goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from typing import Any

import psutil

QUIET = 0.05  # seconds in which the engine's processes take no more than IDLE of processor time: nothing is under way
IDLE = 0.004
LONGEST = 5.0  # seconds to wait for that
HITS = "vllm:prompt_tokens_cached_by_source"
KVTIER = "vllm:kvtier_"


def build(plan: dict[str, Any]) -> Any:
    from vllm import LLM

    from kvtier.lab.smollm2 import packaged_model

    return LLM(model=plan.pop("model") or str(packaged_model()), seed=0, disable_log_stats=False, **plan)


def do_not_spin() -> None:
    """vLLM's processes look for messages in a loop, for a second after each; then they wait to be woken. Here several
    engines share the cores, of which one is asked at a time: those that are not must not take any from it, nor may
    what a request costs be hidden behind that second. So all wait to be woken at once."""
    from vllm.distributed.device_communicators import shm_broadcast

    begin = shm_broadcast.SpinCondition.__init__

    def without_loop(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.busy_loop_s = 0.0

    shm_broadcast.SpinCondition.__init__ = without_loop


def ask(llm: Any, prompts: list[list[int]], answer: int) -> list[dict[str, Any]]:
    """TTFT and TPOT as vLLM itself took them: to the first token at the front end, and between tokens in the core.
    ``cpu``: what all of the engine's processes took for all of them, to the end of what they did afterwards, as
    storing."""
    from vllm import SamplingParams

    began = cpu()
    sampling = SamplingParams(temperature=0, max_tokens=answer, min_tokens=answer, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
    spent = when_quiet() - began
    return [taken(output) | {"cpu": spent} for output in outputs]


def taken(output: Any) -> dict[str, Any]:
    times, given = output.metrics, list(output.outputs[0].token_ids)
    tpot = (times.last_token_ts - times.first_token_ts) / (len(given) - 1) if len(given) > 1 else None
    return {"ttft": times.first_token_latency, "tpot": tpot, "tokens": given, "cached": output.num_cached_tokens}


def cpu() -> float:
    """Seconds of processor time of this process and all below it, by their clocks (clock_getcpuclockid(3)):
    psutil's are of 10 ms."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in processes())


@cache
def processes() -> tuple[int, ...]:
    """They are the same from when the engine is up, and to look for them each time would cost more than a step."""
    own = psutil.Process()
    return own.pid, *(child.pid for child in own.children(recursive=True))


def when_quiet() -> float:
    """Wait until nothing is under way any more; returns the processor time until then."""
    end, before = time.monotonic() + LONGEST, cpu()
    while True:
        time.sleep(QUIET)
        now = cpu()
        if now - before <= IDLE or time.monotonic() >= end:
            return now
        before = now


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
    do_not_spin()
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
elif __name__ == "__mp_main__":  # one of vLLM's own processes
    do_not_spin()
