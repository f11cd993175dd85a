"""The connector inside the real vLLM on the CPU, in float32: what it serves changes no token."""

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

from tests.engines.in_vllm import models
from tests.engines.in_vllm.conftest import EXTRA

FULL = 6 * 32  # tokens of a prompt in full blocks

pytestmark = pytest.mark.timeout(900)


def tokens(results):
    return [result["tokens"] for result in results]


def cached(results):
    return [result["cached"] for result in results]


@pytest.fixture(scope="module")
def page(model):
    """Bytes of a block."""
    return models.page_bytes(model, 32)


def test_a_prompt_that_vllm_evicted_is_served_from_host_memory(plain, first, page):
    *results, _, salted, metrics = first[0]
    assert tokens(results) == plain[:3] * 2
    assert cached(results) == [0, 0, 0, FULL, FULL, FULL]
    assert salted == {"tokens": plain[0], "cached": 0}, "another salt, another cache"
    assert metrics["vllm:external_prefix_cache_hits"] == 3 * FULL
    assert metrics["vllm:prompt_tokens_cached_by_source:host"] == 3 * FULL
    assert metrics["vllm:kvtier_loaded_tokens:host"] == 3 * FULL
    assert metrics["vllm:kvtier_bytes_moved:host_to_device"] == 3 * 6 * page
    assert not any(name.startswith("vllm:kvtier_failures") for name in metrics)


def test_a_step_that_waits_for_its_loads_changes_no_token_and_what_does_not_come_is_computed(
    run, plain, page, tmp_path
):
    extra = EXTRA | {"load_mode": "sync", "mover.verify_host": True}
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/told"}
    *asked, _, alone, together, before, told, _, _, lost, again, also, after = run(
        extra,
        *[["generate", n] for n in (0, 1, 2, 3)],
        ["quiet"],
        ["generate", 0],
        ["batch", [1, 2]],
        ["metrics"],
        ["events"],
        ["abort", 3, 1],
        ["spoil"],
        ["generate", 0],
        ["generate", 0],
        ["batch", [1, 3]],
        ["metrics"],
        options={"kv_events_config": publisher},
    )
    assert tokens([*asked, alone, *together]) == [*plain, *plain[:3]]
    assert cached([*asked, alone, *together]) == [0, 0, 0, 0, FULL, FULL, FULL]
    assert before["vllm:kvtier_loads_synchronous"] == 3
    assert before["vllm:kvtier_loaded_tokens:host"] == 3 * FULL
    assert before["vllm:prompt_tokens_cached_by_source:host"] == 3 * FULL
    assert before["vllm:kvtier_bytes_moved:host_to_device"] == 3 * 6 * page
    assert not any(name.startswith("vllm:kvtier_failures") for name in before)
    stored = {
        medium: {name for kind, where, names in told for name in names if where == medium and kind == "BlockStored"}
        for medium in ("CPU", "GPU")
    }
    assert len(stored["CPU"]) == 4 * 6
    assert stored["CPU"] <= stored["GPU"], "named as vLLM names them"
    assert cached([again]) == [FULL]
    assert tokens([lost, again, *also]) == [plain[0], plain[0], plain[1], plain[3]]
    assert after["vllm:kvtier_failures:corrupt"] == 3 * 6
    more = after["vllm:kvtier_loaded_tokens:host"] - before["vllm:kvtier_loaded_tokens:host"]
    assert more == 2 * FULL, "of the aborted one, and what was computed again and stored"


def test_blocks_on_a_gpu_change_no_token(run, plain, store, page):
    """Over an emulated one: vLLM's blocks, this package's copies in their order, and what both say of it."""
    *results, _, races, metrics = run(
        EXTRA | {"disk.path": str(store), "mover.verify_host": True},
        *[["generate", n] for n in (2, 3, 0, 3, 2)],
        ["batch", [0, 1]],
        ["abort", 3, 1],
        ["quiet"],
        ["races"],
        ["metrics"],
        gpu=True,
    )
    *alone, together, _ = results
    assert tokens([*alone, *together]) == [plain[n] for n in (2, 3, 0, 3, 2, 0, 1)]
    assert cached([*alone, *together]) == [FULL, 0, FULL, FULL, FULL, FULL, FULL]
    assert metrics["vllm:kvtier_loaded_tokens:disk"] >= 2 * FULL, "one of two that came together may be read ahead"
    assert metrics["vllm:kvtier_bytes_moved:device_to_host"] == 6 * page, "of the one that no disk had"
    assert not any(name.startswith("vllm:kvtier_failures") for name in metrics)
    assert races == []


def test_guessed_tokens_are_neither_stored_nor_missed(run, alone):
    """Speculative decoding without a draft model: what was accepted of the guesses is KV like any other."""
    asked = [["generate", n] for n in (100, 101, 102, 100, 101, 102)]
    guess = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    *results, metrics = run(EXTRA | {"load_mode": "sync"}, *asked, ["metrics"], options=guess)
    assert tokens(results) == [alone[n] for _, n in asked]
    assert cached(results) == [0, 0, 0, FULL, FULL, FULL]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert metrics["vllm:kvtier_loads_synchronous"] == 3
    assert metrics["vllm:kvtier_loaded_tokens:host"] == 3 * FULL


def test_after_a_restart_it_is_served_from_disk(run, plain, store):
    *results, metrics = run(EXTRA | {"disk.path": str(store)}, *[["generate", n] for n in (2, 0, 3)], ["metrics"])
    assert tokens(results) == [plain[2], plain[0], plain[3]]
    assert cached(results) == [FULL, FULL, 0]
    assert metrics["vllm:prompt_tokens_cached_by_source:disk"] == 2 * FULL
    assert metrics["vllm:kvtier_loaded_tokens:disk"] == 2 * FULL
    assert metrics.get("vllm:kvtier_loaded_tokens:host", 0) == 0


def test_damage_aborts_and_resets_change_no_token(run, plain, store, page):
    (slab,) = store.rglob("slab")
    with slab.open("r+b") as file:  # one bit in every page that holds anything
        for at in range(0, slab.stat().st_size - page + 1, page):
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
