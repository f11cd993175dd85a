"""The lab's engine on a tiny random model: same tokens as plain generation, whatever the cache and the batch do."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fake_manager import FakeManager  # noqa: E402

from kvtier.lab.engine import LabEngine  # noqa: E402
from kvtier.lab.model import load_model, random_config  # noqa: E402
from kvtier.lab.request import Phase  # noqa: E402

BLOCK, CHUNK = 8, 32
torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much where the cores are busy


@pytest.fixture(scope="module")
def model():
    return load_model(config=random_config(), dtype="float32", seed=3)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def plain(model, tokens: list[int], count: int) -> list[int]:
    """transformers' own greedy generation, with its own attention and cache."""
    model.network.set_attn_implementation("sdpa")
    try:
        ids = torch.tensor([tokens])
        out = model.network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return out[0, len(tokens) :].tolist()
    finally:
        model.network.set_attn_implementation("kvtier_paged")


class Rig:
    def __init__(self, model, blocks: int = 64, max_batch: int = 4, **manager):
        self.pool = model.new_pool(blocks, BLOCK)
        self.manager = FakeManager(self.pool, **manager)
        self.engine = LabEngine(
            model, self.manager, self.pool, chunk_tokens=CHUNK, max_batch=max_batch, keep_logits=True, stall_seconds=2.0
        )
        self.count = 0

    def one(self, tokens, count=6, **options):
        self.count += 1
        self.engine.add(f"r{self.count}", tokens, count, **options)
        (result,) = self.engine.run(60)
        self.manager.check()
        return result


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 40, 63, 64, 65, 100])
def test_generates_what_plain_generation_does(model, length):
    tokens = prompt(length, length)
    result = Rig(model).one(tokens, 20)
    assert result.tokens == plain(model, tokens, 20)
    assert result.finish_reason == "length"
    assert result.computed_tokens == length + 19


def test_sequences_in_a_batch_equal_each_alone(model):
    prompts = [prompt(n, n) for n in (5, 8, 33, 64, 70, 17)]
    alone = [Rig(model).one(p, 12).tokens for p in prompts]
    rig = Rig(model, max_batch=4)
    for index, tokens in enumerate(prompts):
        rig.engine.add(str(index), tokens, 12)
    together = {r.request_id: r.tokens for r in rig.engine.run(60)}
    assert [together[str(i)] for i in range(len(prompts))] == alone


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_hit_at_any_block_boundary_gives_the_bytes_of_a_cold_run(model, tier):
    tokens = prompt(75, 1)
    cold = Rig(model).one(tokens)
    for hit in range(BLOCK, 75, BLOCK):
        rig = Rig(model)
        # another prompt that shares the first `hit` tokens, then ends at once
        rig.one([*tokens[:hit], tokens[hit] ^ 1], 1)
        if tier == "host":
            rig.manager.empty_device()
        warm = rig.one(tokens)
        assert warm.tokens_by_tier[tier] == hit
        assert warm.tokens_by_tier["computed"] == 75 - hit
        assert warm.tokens == cold.tokens
        assert np.array_equal(warm.first_logits, cold.first_logits)


def test_shared_slots_are_never_written(model):
    rig = Rig(model)
    tokens = prompt(60, 2)
    rig.one(tokens)
    shared = {slot for key, slot in rig.manager.device.items() if len(key) <= 56}
    before = [t[sorted(shared)].clone() for t in rig.pool.tensors]
    rig.one(tokens)
    for old, tensor in zip(before, rig.pool.tensors, strict=True):
        assert torch.equal(old, tensor[sorted(shared)])


def test_another_prefix_changes_the_logits(model):
    tokens = prompt(40, 4)
    first = Rig(model).one(tokens)
    other = Rig(model).one([tokens[0] ^ 1, *tokens[1:]])
    assert not np.array_equal(first.first_logits, other.first_logits)


def test_a_request_waits_for_its_load_while_others_run(model):
    rig = Rig(model, load_polls=6)
    tokens = prompt(40, 5)
    rig.one(tokens)
    rig.manager.empty_device()
    rig.engine.add("late", tokens, 2)
    rig.engine.add("other", prompt(20, 6), 2)
    rig.engine.step()
    assert rig.engine.phase("late") is Phase.LOADING
    assert rig.engine.phase("other") is Phase.DECODE
    results = {r.request_id: r for r in rig.engine.run(60)}
    assert results["late"].tokens_by_tier["host"] == 32
    assert list(results) == ["other", "late"]


def test_a_load_that_ends_short_is_computed_instead(model):
    tokens = prompt(75, 7)
    cold = Rig(model).one(tokens)
    for lost in range(9):
        rig = Rig(model)
        rig.one(tokens)
        rig.manager.empty_device()
        rig.manager.lose = {lost}
        warm = rig.one(tokens)
        assert warm.tokens_by_tier["host"] == lost * BLOCK
        assert warm.lost_tokens == 72 - lost * BLOCK
        assert warm.tokens == cold.tokens
        assert np.array_equal(warm.first_logits, cold.first_logits)


@pytest.mark.parametrize("host", [True, False])
def test_sequences_that_do_not_fit_together_are_preempted_and_finish_right(model, host):
    prompts = [prompt(30, 10 + n) for n in range(5)]
    alone = [Rig(model).one(p, 40).tokens for p in prompts]
    rig = Rig(model, blocks=20, host=host)
    for index, tokens in enumerate(prompts):
        rig.engine.add(str(index), tokens, 40)
    results = {r.request_id: r for r in rig.engine.run(120)}
    rig.manager.check()
    assert [results[str(i)].tokens for i in range(5)] == alone
    assert sum(r.preemptions for r in results.values()) > 0
    recomputed = sum(r.recomputed_tokens for r in results.values())
    # swapped out, only the partial last block of each preemption is lost
    assert recomputed > 0 if not host else recomputed < BLOCK * sum(r.preemptions for r in results.values())


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.LOADING, Phase.PREFILL, Phase.DECODE])
def test_abort_is_legal_in_every_phase(model, phase):
    rig = Rig(model, max_batch=1, load_polls=3)
    tokens = prompt(90, 8)
    rig.one(tokens[:50])
    rig.manager.empty_device()
    if phase is Phase.WAITING:
        rig.engine.add("first", prompt(8, 9), 30)
        rig.engine.step()
    rig.engine.add("victim", tokens if phase is not Phase.PREFILL else prompt(90, 11), 20)
    for _ in range(40):
        rig.engine.step()
        if rig.engine.phase("victim") is phase:
            break
    assert rig.engine.phase("victim") is phase
    assert rig.engine.abort("victim")
    assert not rig.engine.abort("victim")
    assert "victim" not in rig.manager.sequences
    rig.manager.check()
    reasons = {r.request_id: r.finish_reason for r in rig.engine.run(60)}
    assert reasons["victim"] == "abort"
    assert not rig.manager.sequences
    rig.manager.check()


def test_abort_of_a_preempted_request(model):
    rig = Rig(model, blocks=12)
    for index in range(2):
        rig.engine.add(str(index), prompt(30, 20 + index), 40)
    for _ in range(200):
        rig.engine.step()
        if rig.engine.phase("1") is Phase.WAITING:
            break
    assert rig.engine.abort("1")
    assert {r.request_id: r.finish_reason for r in rig.engine.run(60)} == {"1": "abort", "0": "length"}
    assert not rig.manager.sequences
    rig.manager.check()


def test_tokens_are_streamed_in_order_with_their_times(model):
    rig = Rig(model)
    seen: list[tuple[int, float]] = []
    result = rig.one(prompt(10), 5, on_token=lambda _, token, when: seen.append((token, when)))
    assert [t for t, _ in seen] == result.tokens
    assert [w for _, w in seen] == result.token_times == sorted(result.token_times)
    assert result.ttft == result.token_times[0] - result.submitted
    assert result.tpot == pytest.approx((result.token_times[-1] - result.token_times[0]) / 4)


def test_stops_at_an_end_token(model):
    tokens = prompt(10)
    free = Rig(model).one(tokens, 6).tokens
    model.network.generation_config.eos_token_id = free[2]
    try:
        stopped = Rig(model).one(tokens, 6)
        assert stopped.tokens == free[: free.index(free[2]) + 1]
        assert stopped.finish_reason == "stop"
        assert Rig(model).one(tokens, 6, ignore_eos=True).tokens == free
    finally:
        model.network.generation_config.eos_token_id = None


@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [
        ([], 1, "accepted: 1 or more"),
        ([1], 0, "accepted: 1 or more"),
        ([256], 1, "accepted: 0 to 255"),
        ([-1], 1, "accepted: 0 to 255"),
        ([1] * 2048, 1, "context: 2049 tokens"),
        ([1] * 500, 20, "device pool: 520 tokens"),
    ],
)
def test_bad_requests_are_refused_in_one_line(model, tokens, count, message):
    rig = Rig(model)
    with pytest.raises(ValueError, match=message) as error:
        rig.engine.add("bad", tokens, count)
    assert "\n" not in str(error.value)
    assert rig.engine.unfinished == 0


def test_a_request_that_finds_no_room_ends_and_says_so(model):
    rig = Rig(model, blocks=16)
    rig.engine.stall_seconds = 0.05
    rig.manager.free_slots.clear()  # somebody else holds the pool and never lets go
    rig.engine.add("r", prompt(20), 4)
    (result,) = rig.engine.run(30)
    assert result.finish_reason == "no room"


def test_run_ends_at_its_deadline(model):
    rig = Rig(model)
    rig.engine.add("r", prompt(8), 400)
    (result,) = rig.engine.run(0.0)
    assert result.finish_reason == "abort"


def test_the_cache_is_told_of_requests_that_have_to_wait(model):
    rig = Rig(model, max_batch=1)
    for index in range(3):
        rig.engine.add(f"q{index}", prompt(20, index), 2)
    rig.engine.step()
    assert [call for call in rig.manager.calls if call.startswith("expect")] == ["expect q1", "expect q2"]
    rig.engine.run(60)
    assert [call for call in rig.manager.calls if call.startswith("expect")] == ["expect q1", "expect q2"]
    assert rig.manager.prefills[0][:2] == (CHUNK, 0)
