"""The first promise on a card: a page from any tier gives the answer that computing it would give."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from kvtier import CacheConfig, CacheManager, DevicePool  # noqa: E402
from kvtier.lab.engine import LabEngine  # noqa: E402
from kvtier.lab.model import load_model, random_config  # noqa: E402
from kvtier.lab.rig import empty_faster  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

BLOCK = 16


@pytest.mark.parametrize("path", ["pieces", "batch", "direct", "staged"])
def test_every_tier_gives_the_answer_of_a_cold_run(tmp_path, path):
    shape = random_config(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, head_dim=32)
    model = load_model(config=shape, dtype="bfloat16", device="cuda")
    pool = model.new_pool(40, BLOCK)
    geometry = model.geometry(BLOCK)
    device = DevicePool(geometry, pool.tensors)
    config = CacheConfig(
        block_size=BLOCK, host={"size": "32MiB"}, disk={"path": tmp_path, "size": "32MiB"},
        cuda={"offload": path, "onboard": path}, load_policy="always",
    )  # fmt: skip
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 256, 16 * BLOCK + 5)]
    with CacheManager(config, geometry, model.namespace(BLOCK), device) as manager:
        assert "CUDA device" in manager.describe()
        engine = LabEngine(model, manager, pool, max_batch=1, keep_logits=True)

        def run(name):
            engine.add(name, tokens, 8, ignore_eos=True)
            (result,) = engine.run(60)
            assert manager.flush(60)
            return result

        cold = run("cold")
        for source in ("device", "host", "disk"):
            empty_faster(manager, device, tokens[: 16 * BLOCK], source)
            warm = run(source)
            assert warm.tokens_by_tier[source] == 16 * BLOCK
            assert np.array_equal(warm.first_logits, cold.first_logits)
            assert warm.tokens == cold.tokens
