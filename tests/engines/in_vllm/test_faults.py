"""Whatever becomes of the tiers below it, the real vLLM answers every request, and as it would alone."""

import errno

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

from tests.engines.in_vllm import models
from tests.engines.in_vllm.conftest import EXTRA

BAD = {"kv_connector": "BadDisk", "kv_connector_module_path": "bad_disk"}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def ask(run, store, tmp_path):
    """An engine on a full disk tier that gets bad when a step says so."""

    def ask(*steps, **extra):
        extra = EXTRA | {"disk.path": str(store), "load_timeout_seconds": 3.0} | extra
        return run(extra, *steps, connector=BAD, environment={"BAD_DISK": str(tmp_path / "bad.json")})

    return ask


def answered(results, plain, asked):
    assert [result["tokens"] for result in results] == [plain[n] for n in asked]


def failures(metrics):
    return sum(value for name, value in metrics.items() if name.startswith("vllm:kvtier_failures"))


def test_without_its_folder_and_after_a_restart_without_what_was_in_it(ask, plain, store):
    first, _, *after, _ = ask(
        ["generate", 0],
        ["remove", str(store)],
        *[["generate", n] for n in (1, 3, 2, 0)],
        ["quiet"],
    )
    answered([first, *after], plain, [0, 1, 3, 2, 0])
    store.mkdir()
    answered(ask(["generate", 1]), plain, [1])


def test_through_a_host_tier_smaller_than_a_prompt_from_a_disk_that_is_slow_then_full_then_dead(ask, plain, model):
    page = models.page_bytes(model, 32)
    small, _, slow, both, _, _, *full, _, _, dead, again, metrics = ask(
        ["batch", [0, 3]],
        ["disk", {"bytes_per_s": 2 * page}],
        ["generate", 1],
        ["batch", [2, 0]],
        ["disk", {"errno": errno.ENOSPC, "on": "WRITE", "count": 3}],
        ["quiet", 4.0],  # until the slow writes have ended
        ["generate", 3],
        ["generate", 1],
        ["disk", {"errno": errno.EIO, "on": "READ", "count": 1000}],
        ["quiet"],
        ["generate", 2],
        ["generate", 2],
        ["metrics"],
        **{"host.size": 3 * (page + 4096), "load_timeout_seconds": 1.0},
    )
    answered([*small, slow, *both, *full, dead, again], plain, [0, 3, 1, 2, 0, 3, 1, 2, 2])
    assert metrics["vllm:kvtier_capacity_pages:host"] == 3
    assert failures(metrics) > 0
