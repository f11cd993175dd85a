"""The lab's prompts are the same every time, as long as they say, and share what they say they share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fake_manager import FakeManager  # noqa: E402

from kvtier.lab.engine import LabEngine  # noqa: E402
from kvtier.lab.model import load_model  # noqa: E402
from kvtier.lab.workload import Chat, document, question, shared_prefix, text  # noqa: E402

torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much where the cores are busy


@pytest.fixture(scope="module")
def model():
    return load_model(dtype="float32")


class Words:
    """A tokenizer that is just good enough: one id for each word."""

    def encode(self, string: str) -> list[int]:
        return [sum(word.encode()) % 256 for word in string.split()]


@pytest.mark.parametrize("worded", [False, True])
def test_documents_are_of_exact_length_repeatable_and_distinct(model, worded):
    model.tokenizer = Words() if worded else None
    try:
        for length in (1, 16, 333, 2000):
            assert len(document(model, length, 1, "a")) == length
        assert document(model, 200, 1, "a") == document(model, 200, 1, "a")
        firsts = [tuple(document(model, 200, 1, n)[:48]) for n in range(20)]
        assert len(set(firsts)) == 20
        assert len(question(model, 21, 1, "q")) == 21
    finally:
        model.tokenizer = None


def test_the_text_is_the_same_in_every_process():
    assert text(2, 7, "x") == text(2, 7, "x")
    assert text(2, 7, "x") != text(2, 8, "x")
    assert len(text(40, 7).split()) > 200


def test_a_shared_prefix_is_shared_to_its_last_token(model):
    prompts = shared_prefix(model, 4, 100, 20)
    assert all(p[:100] == prompts[0][:100] for p in prompts)
    assert len({tuple(p[100:]) for p in prompts}) == 4


def test_a_chat_round_finds_all_that_was_computed_in_the_rounds_before(model):
    pool = model.new_pool(200, 8)
    manager = FakeManager(pool)
    engine = LabEngine(model, manager, pool, chunk_tokens=32, max_batch=4)
    chat = Chat(model, users=3, rounds=3, system_tokens=16, document_tokens=40, question_tokens=10, output_tokens=5)
    turns = chat.run(engine, 60)
    assert sorted((t.user, t.round) for t in turns) == [(u, r) for u in range(3) for r in range(3)]
    for turn in turns:
        result = turn.result
        assert len(result.tokens) == 5
        assert result.prompt_tokens == 16 + 40 + 10 + 15 * turn.round
        if turn.round:
            assert turn.history == 16 + 40 + 15 * turn.round - 1
            assert result.tokens_by_tier["device"] == turn.history // 8 * 8
        else:
            assert turn.history == 0
            assert result.tokens_by_tier["device"] in (0, 16)
    assert chat.context_tokens == 16 + 40 + 45
    assert chat.working_set_tokens == 16 + 3 * 85
    assert engine.unfinished == 0


def test_a_chat_that_is_late_is_aborted(model):
    pool = model.new_pool(64, 8)
    engine = LabEngine(model, FakeManager(pool), pool, chunk_tokens=32, max_batch=4)
    turns = Chat(model, users=2, rounds=2, document_tokens=20).run(engine, 0.0)
    assert {t.result.finish_reason for t in turns} == {"abort"}
    assert engine.unfinished == 0


@pytest.mark.parametrize("name", ["users", "rounds", "document_tokens", "question_tokens", "output_tokens"])
def test_a_chat_of_nothing_is_refused(model, name):
    with pytest.raises(ValueError, match=f"{name}: 0"):
        Chat(model, **{"users": 1, "rounds": 1, name: 0})
