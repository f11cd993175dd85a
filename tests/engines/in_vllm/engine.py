"""A real vLLM, away from the tests' process: reads a plan from its arguments, prints what happened as JSON.

    python engine.py '{"model": "/a/folder", "extra": {"host.size": "64MiB"}, "steps": [["generate", 0], ["metrics"]]}'

``extra`` null: no connector. ``processes``: front end, engine and worker in a process each, as vLLM is by default; one
for all starts several times faster. ``gpu``: vLLM's blocks lie on a GPU, emulated in the memory where they are; in one
process. Steps: ``generate`` [prompt number, salt], ``batch`` [prompt numbers], ``reset``
[connector too], ``quiet`` (until nothing is under way), ``abort`` [prompt number, after how many engine steps],
``spoil`` (one bit of every page in host memory), ``events`` (told by vLLM's publisher since the start: kind, medium,
blocks), ``metrics``, ``races`` (that the emulated GPU saw), ``remove`` [folder], ``disk`` [what bad_disk.py is to make
of it].
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Several threads, or one that may not leave its core, mostly wait on a machine that is busy with other things too.
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BLOCK = 32
PROMPT = 200  # tokens: six full blocks and a part
DEVICE_BLOCKS = 12  # the longest request and one more: each prompt pushes the one before it out


def prompt(number):
    """From 100 on its tokens repeat, so that what follows can be guessed from it."""
    if number >= 100:
        return [(37 * number + 1009 * (i % 10)) % 4000 + 100 for i in range(PROMPT)]
    return [(7 * i + 13 * number * (i % 5 + 1)) % 40000 + 100 for i in range(PROMPT)]


def make(plan):
    from vllm import LLM

    options = {
        "dtype": "float32",
        "max_model_len": 320,
        "block_size": BLOCK,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "max_num_seqs": 2,
        "enforce_eager": True,
        "seed": 0,
    }
    if plan["extra"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": plan["extra"],
        } | plan.get("connector", {})
    options |= plan.get("options", {})
    return LLM(model=plan["model"], skip_tokenizer_init=True, disable_log_stats=False, **options)


def subscribe(plan):
    """To the events that an engine will publish."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe("")
    socket.connect(plan["options"]["kv_events_config"]["endpoint"])
    return socket


def emulate_gpu():
    """All of what serves one but the silicon: its queues, its copies, their ends."""
    from kvtier.connectors.vllm import worker
    from kvtier.tiers.cuda import CudaDevice
    from kvtier.tiers.device import DevicePool

    worker.DevicePool = lambda geometry, tensors: DevicePool(geometry, tensors, cuda=CudaDevice.emulated_device(5))


class Driver:
    def __init__(self, plan):
        from vllm import SamplingParams

        self.published = subscribe(plan) if "kv_events_config" in plan.get("options", {}) else None
        if plan.get("gpu"):
            emulate_gpu()
        self.llm = make(plan)
        self.sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def generate(self, number, salt=None):
        return self.batch([number], salt)[0]

    def batch(self, numbers, salt=None):
        prompts = [{"prompt_token_ids": prompt(n)} | ({"cache_salt": salt} if salt else {}) for n in numbers]
        outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        return [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]

    def abort(self, number, steps):
        engine = self.llm.llm_engine
        engine.add_request(f"abort-{number}-{steps}", {"prompt_token_ids": prompt(number)}, self.sampling)
        for _ in range(steps):
            engine.step()
        engine.abort_request([f"abort-{number}-{steps}"])

    def reset(self, connector):
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def remove(self, folder):
        shutil.rmtree(folder)

    def spoil(self):
        """One bit in every page in host memory; the engine has to be in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        host = get_kv_transfer_group()._worker._plane.host
        for slot in range(host.slots):
            host.page(slot)[12345] ^= 1

    def races(self):
        """Uses of the same bytes without an order between them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker._plane.device.cuda.native.races()

    def events(self):
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        told = []
        while self.published.poll(500):
            batch = msgspec.msgpack.decode(self.published.recv_multipart()[-1], type=KVEventBatch)
            told += [[type(e).__name__, e.medium, [str(name) for name in e.block_hashes]] for e in batch.events]
        return told

    def disk(self, said):
        """Whole or not at all, since the worker reads it meanwhile."""
        file = Path(os.environ["BAD_DISK"])
        file.with_suffix(".new").write_text(json.dumps(said))
        file.with_suffix(".new").rename(file)

    def quiet(self, seconds=1.0):
        """An engine in a process of its own goes on as long as stores are under way; here it has to be told."""
        from vllm.v1.engine.core_client import InprocClient

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if isinstance(self.llm.llm_engine.engine_core, InprocClient):
                self.llm.llm_engine.engine_core.get_output()
            time.sleep(0.01)

    def metrics(self):
        found = {}
        for metric in self.llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            if hasattr(metric, "value"):
                found[":".join([metric.name, *labels.values()])] = metric.value
        return found


def main():
    answers = os.fdopen(os.dup(1), "w")  # what vLLM says must not be taken for an answer
    os.dup2(2, 1)
    plan = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(plan.get("processes", False)))
    driver = Driver(plan)
    results = [getattr(driver, name)(*arguments) for name, *arguments in plan["steps"]]
    driver.llm.llm_engine.engine_core.shutdown()
    print(json.dumps(results), file=answers, flush=True)


if __name__ == "__main__":
    main()
