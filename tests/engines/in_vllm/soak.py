"""A real vLLM under load for as long as is wanted: requests that share beginnings arrive, are preempted, end or are
aborted in every state; the prefix cache is reset under them. Every answer must be vLLM's own, and at the end nothing is
held.

    python tests/engines/in_vllm/soak.py --minutes 10

Prints what happened as JSON, and the seed first, which repeats the choices (not the timing). Exits with 1 for a wrong
answer, and with an AssertionError where something is still held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # so that what is held can be looked at from here
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BLOCK = 32
DEVICE_BLOCKS = 26  # two long requests and a bit: the third one preempts
LONGEST = 320
ANSWER = 24
PROMPTS = 32


def prompt(number: int) -> list[int]:
    """One of four beginnings, left at some point for an end of its own."""
    draw = random.Random(number)
    stem, fork = random.Random(f"stem {number % 4}"), draw.choice([0, 70, 150, 250])
    length = draw.randint(max(fork, 40) + 1, LONGEST - ANSWER)
    return [stem.randrange(100, 40000) for _ in range(fork)] + [
        draw.randrange(100, 40000) for _ in range(length - fork)
    ]


def make(model: Path, extra: dict | None):
    from vllm import LLM

    options = {}
    if extra is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": extra,
        }  # fmt: skip
    return LLM(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST, block_size=BLOCK,
        num_gpu_blocks_override=DEVICE_BLOCKS, max_num_seqs=4, max_num_batched_tokens=128, enforce_eager=True, seed=0,
        **options,
    )  # fmt: skip


def sampling(answer: int):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)


def references(model: Path) -> list[list[int]]:
    """What vLLM answers without a connector, one request at a time."""
    llm = make(model, None)
    prompts = [{"prompt_token_ids": prompt(number)} for number in range(PROMPTS)]
    return [list(llm.generate(one, sampling(ANSWER), use_tqdm=False)[0].outputs[0].token_ids) for one in prompts]


class Load:
    def __init__(self, llm, wanted: list[list[int]], seed: int) -> None:
        self.engine, self.wanted = llm.llm_engine, wanted
        self.core = self.engine.engine_core.engine_core
        self.random = random.Random(seed)
        self.asked: dict[str, tuple[int, int]] = {}  # request → prompt, tokens of its answer
        self.seen: Counter[str] = Counter()
        self.free = self.pool.get_num_free_blocks()

    @property
    def pool(self):
        return self.core.scheduler.kv_cache_manager.block_pool

    def step(self) -> None:
        habits = {self.arrive: 3, self.abort: 1, self.reset: 0.05, self.nothing: 8}
        self.random.choices(list(habits), list(habits.values()))[0]()
        for output in self.engine.step():
            if output.finished and output.request_id in self.asked:
                self.check(output)

    def nothing(self) -> None:
        """Happens."""

    def arrive(self) -> None:
        if len(self.asked) >= 8:
            return
        self.seen["requests"] += 1
        name, number, answer = (
            f"r{self.seen['requests']}",
            self.random.randrange(PROMPTS),
            self.random.randint(1, ANSWER),
        )
        self.asked[name] = number, answer
        self.engine.add_request(name, {"prompt_token_ids": prompt(number)}, sampling(answer))

    def abort(self) -> None:
        if self.asked:
            name = self.random.choice(sorted(self.asked))
            self.seen["aborted"] += 1
            del self.asked[name]
            self.engine.abort_request([name])

    def reset(self) -> None:
        whole = self.random.random() < 0.3
        try:
            done = self.core.scheduler.reset_prefix_cache(self.random.random() < 0.5, reset_connector=whole)
        except RuntimeError:  # vLLM's, while a request is loading
            done = False
        self.seen[f"reset {'everything' if whole else 'vLLM'}: {'done' if done else 'refused'}"] += 1

    def check(self, output) -> None:
        number, answer = self.asked.pop(output.request_id)
        self.seen["answered"] += 1
        if list(output.outputs[0].token_ids) != self.wanted[number][:answer]:
            self.seen["wrong"] += 1
            print(f"{output.request_id}, prompt {number}: another answer than vLLM's own", file=sys.stderr)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished and output.request_id in self.asked:
                    self.check(output)
        for _ in range(2000):
            if not self.core.scheduler.get_kv_connector().has_pending_push_work():
                break
            self.core.step_fn()

    def look(self) -> None:
        """Nothing is held: not a block of vLLM's, not a slot, not a lease, not a transfer."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side, worker = self.core.scheduler.get_kv_connector()._scheduler, get_kv_transfer_group()._worker
        manager = side.manager
        assert self.pool.get_num_free_blocks() == self.free, (self.pool.get_num_free_blocks(), self.free)
        manager.catalog.check()
        assert manager.catalog.stats()["leases"] == 0
        for tier, usage in manager.stats().slots.items():
            assert usage["free"] + usage["ready"] == usage["capacity"], (tier, usage)
        for what in (
            side._requests,
            side._loads,
            manager._requests,
            manager._loads._tickets,
            manager._reading,
            worker._loading,
        ):
            assert not what, what
        assert side._relay.pending() == 0
        assert worker._plane.pending() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--references", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from tests.engines.in_vllm import models

    with tempfile.TemporaryDirectory() as name:
        folder = options.references.parent if options.references else Path(name)
        model = models.folder(folder)
        if options.references:
            options.references.write_text(json.dumps(references(model)))
            return
        print(f"seed {options.seed}", flush=True)
        file = folder / "references.json"
        subprocess.run([sys.executable, __file__, "--references", str(file)], check=True)
        (folder / "kv").mkdir()
        page = models.page_bytes(model, BLOCK) + 4096
        extra = {"host.size": 40 * page, "disk.path": str(folder / "kv"), "disk.size": 300 * page + (8 << 20)}
        load = Load(make(model, extra | {"load_policy": "always"}), json.loads(file.read_text()), options.seed)
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            load.step()
        load.finish()
        load.look()
        stats = load.core.scheduler.get_kv_connector()._scheduler.manager.stats()
        told = {"seen": dict(load.seen), "found": stats.tokens_found, "failures": stats.failures}
        print(json.dumps(told | {"moved": stats.bytes_moved, "stores_dropped": stats.stores_dropped}), flush=True)
        load.engine.engine_core.shutdown()
    sys.exit(bool(load.seen["wrong"]))


if __name__ == "__main__":
    main()
