"""The tier below vLLM's own offloading, with vLLM's types and real bytes, without a model."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.config import ConfigError
from kvtier.connectors.vllm import KVTierSecondaryTier

CHUNK, CHUNKS = 8192, 16
HIT, MISS = LookupResult.HIT, LookupResult.MISS
KEYS = [make_offload_key(bytes([n]) * 32, n % 2) for n in range(6)]


class Primary:
    """vLLM's part: chunks of memory, and the jobs it gives out."""

    def __init__(self, folder, **settings):
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
        groups = tuple(OffloadingGroupConfig(32, (f"layer.{n}",), n) for n in range(2))
        config = OffloadingConfig(
            groups, CHUNK, False, {}, "engine", OffloadingModelConfig("a model", "float32"),
            OffloadingCacheConfig(32, 1), parallel, kv_cache_layout="LBHNC",
        )  # fmt: skip
        self.memory = np.random.default_rng(0).integers(-128, 127, (CHUNKS, CHUNK), np.int8)
        self.view = memoryview(self.memory)
        settings = {"weights_revision": "1", "disk.path": str(folder), "disk.size": "64MiB"} | settings
        self.tier = KVTierSecondaryTier(
            SimpleNamespace(config=config, replicated_layout=False), self.view, "t", **settings
        )
        self.jobs = 0

    def move(self, keys, chunks, promotion, request="r"):
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(chunks, np.int32), promotion, ReqContext(request))
        (self.tier.submit_load if promotion else self.tier.submit_store)(job)
        while True:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == self.jobs
                return result
            time.sleep(0.001)

    def look(self, keys, request="r"):
        return [self.tier.lookup(key, ReqContext(request)) for key in keys]

    def shutdown(self):
        while self.tier.has_pending_work():
            assert not list(self.tier.get_finished_jobs())
            time.sleep(0.001)
        self.tier.shutdown()
        self.view.release()  # as vLLM does next; BufferError where anybody still holds it


@pytest.fixture
def primary(tmp_path):
    made = []

    def make(**settings):
        made.append(Primary(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        if hasattr(one.tier, "_pages"):
            one.tier.shutdown()


def test_chunks_come_back_also_after_a_restart(primary):
    first = primary()
    assert first.look(KEYS) == [MISS] * 6
    assert first.move(KEYS[:4], [0, 1, 2, 3], promotion=False).success
    assert first.look(KEYS) == [HIT] * 4 + [MISS] * 2
    wanted = first.memory[:4].copy()
    first.tier.touch(KEYS[:4], ReqContext("r"))
    first.shutdown()
    second = primary()
    second.memory[:] = 0
    result = second.move(KEYS[:4], [8, 9, 10, 11], promotion=True)
    assert result.success
    assert (second.memory[8:12] == wanted).all()
    second.shutdown()


def test_what_could_not_be_had_once_is_a_miss_to_that_request_until_it_ends(primary):
    engine = primary()
    engine.move(KEYS[:1], [0], promotion=False)
    result = engine.move([KEYS[0], KEYS[5]], [8, 9], promotion=True)
    assert (result.success, result.successful_keys) == (False, (KEYS[0],))
    engine.move(KEYS[5:], [1], promotion=False)
    assert engine.look(KEYS[5:]) == [MISS]
    assert engine.look(KEYS[5:], "another") == [HIT]
    engine.tier.on_request_finished(ReqContext("r"))
    assert engine.look(KEYS[5:]) == [HIT]
    engine.shutdown()


def test_to_drain_is_to_forget(primary):
    engine = primary()
    engine.move(KEYS, range(6), promotion=False)
    engine.tier.submit_load(TransferJob(77, KEYS, np.arange(8, 14, dtype=np.int32), True, ReqContext("r")))
    engine.tier.drain_jobs()
    assert [result.job_id for result in engine.tier.get_finished_jobs()] == [77]
    assert engine.look(KEYS) == [MISS] * 6
    engine.shutdown()
    engine = primary()
    assert engine.look(KEYS) == [MISS] * 6
    engine.shutdown()


def test_another_revision_finds_nothing(primary):
    engine = primary()
    engine.move(KEYS, range(6), promotion=False)
    engine.shutdown()
    assert primary(weights_revision="2").look(KEYS) == [MISS] * 6


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights_revision": ""}, "weights_revision"),
        ({"disk.path": "/nowhere"}, "disk.path"),
        ({"disk.sise": "1GiB"}, "disk.size"),
        ({"host.write": "never"}, "host.write"),
    ],
)
def test_what_cannot_be_is_refused_by_name(primary, settings, named):
    with pytest.raises(ConfigError, match=named):
        primary(**settings)
