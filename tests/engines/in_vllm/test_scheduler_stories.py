"""Stories of vLLM's real schedulers and the connector's two sides: whatever happens, no step reads a block that does
not hold what it should, and at the end nothing is held."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

from vllm.v1.request import RequestStatus

from kvtier.catalog import Tier
from kvtier.sim.plane import Faults
from tests.engines.in_vllm.stories import CALM, Engine

TIERS = [{Tier.HOST: 40, Tier.DISK: 80}, {Tier.HOST: 6, Tier.DISK: 60}, {Tier.HOST: 60}]
FAULTS = {"calm": (CALM, 0.0), "faulty": (Faults(page=0.1, repeat=0.2, refuse=0.1), 0.1)}
each_kind = pytest.mark.parametrize("kind", sorted(FAULTS))
all_tiers = pytest.mark.parametrize("tiers", TIERS, ids=lambda tiers: "-".join(map(str, tiers.values())))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture
def tell(seed, tmp_path, monkeypatch):
    """A whole story and how it ends."""

    def story(kind, tiers, *, steps=600, extra=None, **how):
        faults, lost = FAULTS[kind]
        extra = {"disk": Tier.DISK in tiers} | (extra or {})
        engine = Engine(
            seed, tmp_path, monkeypatch, blocks=14, tiers=tiers, faults=faults, lost=lost, extra=extra, **how
        )
        for _ in range(steps):
            engine.live()
        engine.finish()
        engine.look()
        stats = engine.side.manager.stats()
        injected = [dict(plane.injected) for plane in engine.planes]
        print(dict(sorted(engine.seen.items())), stats.tokens_found, stats.prefetched, injected)
        assert kind == "faulty" or sum(stats.tokens_found.values()), "nothing was loaded in a whole story"
        return engine

    return story


@each_kind
@all_tiers
@pytest.mark.parametrize(
    ("ranks", "write", "mode"), [(1, "at_once", "async"), (2, "second_use", "async"), (2, "at_once", "sync")]
)
def test_no_story_reads_a_wrong_block_or_leaves_anything_behind(kind, tiers, ranks, write, mode, tell):
    options = {"long_prefill_token_threshold": 40} if mode == "sync" else {}
    tell(kind, tiers, ranks=ranks, extra={"host.write": write, "load_mode": mode}, options=options)


@each_kind
@all_tiers
@pytest.mark.parametrize(("ranks", "write", "runner"), [(1, "at_once", "V1"), (2, "second_use", "V2")])
def test_a_step_made_before_the_output_of_the_last_one_is_known_changes_none_of_it(
    kind, tiers, ranks, write, runner, tell
):
    engine = tell(kind, tiers, ranks=ranks, extra={"host.write": write}, ahead=1, v2=runner == "V2")
    assert engine.scheduler.use_v2_model_runner == (runner == "V2")


GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}


@each_kind
@pytest.mark.parametrize("ahead", [0, 1], ids=["settled", "ahead"])
def test_no_block_is_stored_that_holds_a_guess(kind, ahead, tell):
    engine = tell(kind, TIERS[0], ranks=2, options=GUESSES, ahead=ahead, drafts=3)
    assert engine.seen["guesses right"]
    assert engine.seen["guesses wrong"]


@pytest.fixture
def engine(seed, tmp_path, monkeypatch):
    """One in which nothing happens by itself."""

    def make(**how):
        made = Engine(seed, tmp_path, monkeypatch, ranks=1, blocks=14, tiers=TIERS[2], extra={"disk": False}, **how)
        made.aborts = 0.0
        return made

    return make


@pytest.mark.parametrize(("ahead", "answer", "stored"), [(0, 25, 2), (1, 25, 1), (1, 60, 2)])
def test_a_block_that_only_the_last_output_settles_is_left_to_whoever_continues(ahead, answer, stored, engine):
    """The answer ends with its 25th token, behind the end of a block: by length, so that no step follows whose orders
    could name the block, or by a stop, which comes when the next step is made already."""
    engine, text = engine(ahead=ahead), list(range(400))
    engine.ask("first", text, 40, answer, stop=text[64])
    engine.finish()
    assert len(engine.told["first"]) == 25
    assert engine.side.manager.stats().slots["host"]["ready"] == stored
    engine.ask("second", text, 65, 1, stop=text[99])
    engine.finish()
    assert engine.side.manager.stats().slots["host"]["ready"] == 2
    engine.look()


@pytest.mark.parametrize("prompt", [20, 40], ids=["computes", "loads"])
def test_who_a_reset_preempts_waits_only_until_it_begins_again_or_ends(prompt, engine):
    engine, text = engine(), list(range(400))
    engine.ask("goes on", text, prompt, 20, stop=text[99])
    engine.ask("ends", text, prompt, 20, stop=text[99])
    for _ in range(10):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.finish_requests("ends", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert not len(engine.side._waiting)
    engine.finish()
    engine.look()
