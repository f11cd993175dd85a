"""kvtier's disk below vLLM's own offloading, inside the real vLLM: what it serves changes no token."""

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

from tests.engines.in_vllm import models

FULL = 6 * 32  # tokens of a prompt in full blocks
NATIVE = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def ask(run, model, tmp_path):
    """An engine with vLLM's own offloading, its memory too small for three prompts, and our disk below it."""
    page = models.page_bytes(model, 32)
    tier = {
        "type": "KVTierSecondaryTier",
        "module_path": "kvtier.connectors.vllm",
        "disk.path": str(tmp_path),
        "disk.size": "256MiB",
    }
    extra = {
        "spec_name": "MemcpyTieringSpec",  # vLLM's own, with a plain copying worker in place of CUDA's
        "spec_module_path": "memcpy_spec",
        "cpu_bytes_to_use": 14 * page,
        "secondary_tiers": [tier],
    }
    return lambda *steps: run(extra, *steps, connector=NATIVE)


def test_vllms_own_offloading_finds_on_our_disk_what_it_evicted_also_after_a_restart_until_it_forgets(ask, plain):
    asked = (0, 1, 2, 0, 1)
    *results, _, metrics = ask(*[["generate", n] for n in asked], ["quiet"], ["metrics"])
    assert [result["tokens"] for result in results] == [plain[n] for n in asked]
    assert [result["cached"] for result in results] == [0, 0, 0, FULL, FULL]
    assert metrics["vllm:prompt_tokens_cached_by_source:disk"] > 0
    again, other, reset, fresh = ask(["generate", 0], ["generate", 3], ["reset", True], ["generate", 0])
    assert again == {"tokens": plain[0], "cached": FULL}
    assert other == {"tokens": plain[3], "cached": 0}
    assert reset is True
    assert fresh == {"tokens": plain[0], "cached": 0}, "what was forgotten is forgotten on disk too"
