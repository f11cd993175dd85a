"""The lab's engine on kvtier beside transformers' own continuous batching, at equal device bytes.

    python bench/engines/transformers_cb.py --context 512 --repeat 5 --out out/transformers.json

Both run the same weights in float32 and the same prompts, one request at a time, interleaved round by round: a prompt
is computed, asked again while its KV is still on the device, and asked again after other prompts have pushed it out.
transformers shares prefixes on the device; its offload keeps whole requests that it has to suspend, not prefixes, so
after eviction it computes again. TTFT runs from submission to the first token on each engine's own clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvtier.config import CacheConfig
from kvtier.lab.machine import describe
from kvtier.lab.rig import Rig, open_model
from kvtier.lab.workload import document, question

BLOCK = 16
REQUEST_SECONDS = 600.0
CASES = ("computed", "device", "evicted")


@contextmanager
def transformers_engine(folder: str, blocks: int, output_tokens: int) -> Iterator[Any]:
    """Their engine with a pool of ``blocks`` blocks; yields serve(tokens) → (seconds to the first token, tokens)."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    # No end token: every answer has the same length, as in the lab with ignore_eos.
    generation = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=BLOCK, num_blocks=blocks, max_batch_tokens=256)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as engine:

        def serve(tokens: list[int]) -> tuple[float, list[int]]:
            name = engine.add_request(tokens, max_new_tokens=output_tokens, record_timestamps=True)
            done = engine.get_result(request_id=name, timeout=REQUEST_SECONDS)
            if done is None or done.error:
                raise RuntimeError(f"transformers: {done.error if done else 'no answer'}")
            return done.timestamps[0] - done.created_time, list(done.generated_tokens)

        yield serve


def measure(context: int, repeat: int, output_tokens: int) -> dict[str, Any]:
    """Rows by engine and case: TTFT in milliseconds, and whether both gave the same tokens."""
    model = open_model(None, 0)
    prompts = [
        document(model, context, seed, "prompt") + question(model, BLOCK, seed, "prompt") for seed in range(repeat)
    ]
    others = [document(model, context, seed, "other") for seed in range(3)]
    blocks = 2 * -(-(context + BLOCK + output_tokens) // BLOCK)  # two requests: a third pushes the first out
    config = CacheConfig(block_size=BLOCK, host={"size": "2GiB"})
    times: dict[str, dict[str, list[float]]] = {name: {c: [] for c in CASES} for name in ("kvtier", "transformers")}
    matches = []
    with tempfile.TemporaryDirectory() as folder:
        model.network.save_pretrained(folder)
        with (
            Rig(model, config, blocks, None, chunk_tokens=64) as rig,
            transformers_engine(folder, blocks, output_tokens) as theirs,
        ):

            def ours(tokens: list[int]) -> tuple[float, list[int]]:
                result = rig.serve(tokens, output_tokens)
                assert result.ttft is not None
                return result.ttft, result.tokens

            engines = {"kvtier": ours, "transformers": theirs}
            for serve in engines.values():
                serve(others[0])  # warm up
            for prompt in prompts:
                answers = []
                for name, serve in engines.items():
                    for case in CASES:
                        if case == "evicted":
                            for other in others:
                                serve(other)
                        seconds, tokens = serve(prompt)
                        times[name][case].append(seconds)
                        answers.append(tokens)
                matches.append(all(answer == answers[0] for answer in answers))
    rows = [
        {"engine": name, "case": case, "n": repeat, "ttft_ms_p50": 1e3 * statistics.median(values)}
        for name, cases in times.items()
        for case, values in cases.items()
    ]
    ratios = {
        case: statistics.median(a / b for a, b in zip(times["kvtier"][case], times["transformers"][case], strict=True))
        for case in CASES
    }
    return {"context": context, "device_blocks": blocks, "rows": rows, "kvtier_to_transformers": ratios,
            "outputs_match": all(matches)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--repeat", type=int, default=5, help="prompts")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/transformers.json"))
    arguments = parser.parse_args()
    result = {
        "machine": describe(None).model_dump(),
        **measure(arguments.context, arguments.repeat, arguments.output_tokens),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(f"{row['engine']:>12} {row['case']:>9}: TTFT {row['ttft_ms_p50']:8.1f} ms (n = {row['n']})")
    print(f"kvtier / transformers: {result['kvtier_to_transformers']}; outputs match: {result['outputs_match']}")


if __name__ == "__main__":
    main()
