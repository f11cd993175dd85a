"""Prompts for the lab: the same on every machine for the same seed, and different from the first block on.

With a tokenizer they are English made of whole sentences (own text, nothing downloaded), so that a real model has
something to continue; without one they are random token ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvtier.lab.engine import LabEngine
    from kvtier.lab.model import LabModel
    from kvtier.lab.request import Result

__all__ = ["Chat", "ChatTurn", "document", "question", "shared_prefix", "text"]

_PEOPLE = (
    "Ada", "the harbour master", "Ilse Brandt", "an old clockmaker", "the night nurse", "Tomas", "the surveyor",
    "a young botanist", "Captain Reyes", "the librarian", "my grandmother", "the ferryman", "Nadia", "the baker",
    "a retired judge", "the schoolteacher",
)  # fmt: skip
_PLACES = (
    "on the north pier", "in the valley of mills", "behind the observatory", "at the edge of the salt marsh",
    "in the reading room", "under the railway bridge", "on the island of Varn", "in a kitchen without windows",
    "beside the frozen canal", "at the weather station", "in the glasshouse", "on the road to Tessel",
)  # fmt: skip
_THINGS = (
    "a brass compass", "three letters tied with string", "the ledger of the year before", "a map of the tides",
    "a lantern with blue glass", "the last of the winter apples", "a box of seeds", "a photograph of a bridge",
    "an unfinished violin", "the key to the tower", "a jar of copper coins", "a list of names",
)  # fmt: skip
_ACTS = (
    "measured the depth of the water", "counted the lamps along the shore", "wrote down every word",
    "repaired the pump before noon", "waited for the second bell", "read the report aloud", "drew the outline again",
    "asked for nothing in return", "found the mistake in the sums", "closed the shutters against the wind",
    "followed the tracks into the wood", "kept the fire alive until morning",
)  # fmt: skip
_WHY = (
    "because the storm was expected before dark", "although nobody had asked for it",
    "so that the others could sleep", "since the old bridge could not be trusted",
    "while the rest of the town was at the market", "before the council could change its mind",
    "as it had been done every autumn", "when the river began to fall",
)  # fmt: skip
_FACTS = (
    "Salt water freezes at a lower temperature than fresh water, which is why the inlet stays open.",
    "A pendulum of one metre swings once in about a second, whatever its weight.",
    "Bees find their way home by the sun, and by landmarks when the sky is grey.",
    "Paper made from rags lasts longer than paper made from wood.",
    "The tide turns roughly every six hours, and a little later each day.",
    "Copper turns green in sea air, but the green layer protects what lies beneath.",
    "Wheat sown in autumn is cut in early summer; wheat sown in spring comes later.",
    "A lens that is thicker in the middle brings distant light to a point.",
)  # fmt: skip
_QUESTIONS = (
    "What should we do about {thing}?", "Why did {person} leave so early?",
    "Tell me more about what was found {place}.", "Summarise what {person} said in two sentences.",
    "What happened next {place}?", "Who had {thing} before that?", "Give me three reasons for it.",
    "Is there anything that {person} forgot?",
)  # fmt: skip


def _rng(seed: int, *path: object) -> np.random.Generator:
    return np.random.default_rng([seed, *(zlib.crc32(str(part).encode()) for part in path)])


def _sentence(rng: np.random.Generator) -> str:
    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    kind = int(rng.integers(5))
    year, count = int(rng.integers(1790, 1990)), int(rng.integers(3, 400))
    if kind == 0:
        made = f"In {year}, {pick(_PEOPLE)} {pick(_ACTS)} {pick(_PLACES)}, {pick(_WHY)}."
    elif kind == 1:
        made = f"{pick(_PEOPLE)} had brought {pick(_THINGS)}, and {pick(_PEOPLE)} {pick(_ACTS)} {pick(_WHY)}."
    elif kind == 2:
        made = f"{pick(_PLACES)} there were {count} people that evening; {pick(_PEOPLE)} {pick(_ACTS)}."
    elif kind == 3:
        made = pick(_FACTS)
    else:
        made = f'"{pick(_THINGS)}," said {pick(_PEOPLE)}, "was left {pick(_PLACES)} in {year}, {pick(_WHY)}."'
    return made[0].upper() + made[1:] if made[0] != '"' else '"' + made[1].upper() + made[2:]


def text(sentences: int, seed: int = 0, *path: object) -> str:
    """Paragraphs of English, ``sentences`` long. ``path`` names the text: another path, another text."""
    rng = _rng(seed, "text", *path)
    title = f"Notes of {_PEOPLE[int(rng.integers(len(_PEOPLE)))]}, number {int(rng.integers(1, 100_000))}.\n\n"
    made = [_sentence(rng) for _ in range(sentences)]
    return title + "\n\n".join(" ".join(made[at : at + 6]) for at in range(0, len(made), 6))


def document(model: LabModel, tokens: int, seed: int = 0, *path: object) -> list[int]:
    """Exactly ``tokens`` token ids of a text named by seed and path; random ids for a model without a tokenizer."""
    if tokens < 1:
        raise ValueError(f"tokens: {tokens}; accepted: 1 or more")
    if model.tokenizer is None:
        return _random_ids(model, tokens, _rng(seed, "ids", *path))
    sentences = tokens // 12 + 8
    while len(ids := model.encode(text(sentences, seed, *path))) < tokens:
        sentences *= 2
    return ids[:tokens]


def question(model: LabModel, tokens: int, seed: int = 0, *path: object) -> list[int]:
    """Exactly ``tokens`` token ids of questions, as a user's turn in a chat."""
    rng = _rng(seed, "question", *path)
    if model.tokenizer is None:
        return _random_ids(model, tokens, rng)
    ids: list[int] = []
    while len(ids) < tokens:
        form = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
        words = {"thing": _THINGS, "person": _PEOPLE, "place": _PLACES}
        chosen = {name: each[int(rng.integers(len(each)))] for name, each in words.items()}
        ids += model.encode("\n\n" + form.format(**chosen))
    return ids[:tokens]


def _random_ids(model: LabModel, count: int, rng: np.random.Generator) -> list[int]:
    allowed = np.setdiff1d(np.arange(model.vocab_size), np.array(sorted(model.eos_tokens), dtype=int))
    return [int(token) for token in rng.choice(allowed, count)]


def shared_prefix(model: LabModel, users: int, prefix: int, own: int, seed: int = 0) -> list[list[int]]:
    """Prompts of ``users`` who ask ``own`` tokens each about one document of ``prefix`` tokens."""
    common = document(model, prefix, seed, "shared")
    return [common + question(model, own, seed, "own", user) for user in range(users)]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request of a chat, with what a cache that forgets nothing would have had of its prompt."""

    user: int
    round: int
    history: int  # tokens of the prompt whose K/V was computed in this chat's earlier rounds
    result: Result


@dataclass(slots=True)
class Chat:
    """``users`` in multi-round chat, each about a document of its own, behind one system prompt.

    A round's prompt is all that was said before (system, document, questions, answers) and a new question. Users run
    in a closed loop: each asks again as soon as it is answered. All answers are ``output_tokens`` long.
    """

    model: LabModel
    users: int
    rounds: int
    system_tokens: int = 64
    document_tokens: int = 512
    question_tokens: int = 32
    output_tokens: int = 16
    seed: int = 0
    turns: list[ChatTurn] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("users", "rounds", "document_tokens", "question_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; accepted: 1 or more")

    @property
    def context_tokens(self) -> int:
        """Tokens of one user's last round, output included."""
        return self.system_tokens + self.document_tokens + self.rounds * (self.question_tokens + self.output_tokens)

    @property
    def working_set_tokens(self) -> int:
        """Tokens whose K/V all users together come back to: what would have to fit for no prefix to be recomputed."""
        return self.users * (self.context_tokens - self.system_tokens) + self.system_tokens

    def opening(self, user: int) -> list[int]:
        """System prompt and the user's document."""
        system = document(self.model, self.system_tokens, self.seed, "system") if self.system_tokens else []
        return system + document(self.model, self.document_tokens, self.seed, "document", user)

    def run(
        self, engine: LabEngine, timeout_s: float = 600.0, on_turn: Callable[[ChatTurn], None] | None = None
    ) -> list[ChatTurn]:
        """Run all rounds of all users; returns the turns in order of ending. What is late is aborted, with its user."""
        said = {user: self.opening(user) for user in range(self.users)}
        history = dict.fromkeys(said, 0)
        self.turns = []
        for user in said:
            self._ask(engine, user, 0, said)
        deadline = engine.clock() + timeout_s
        while engine.unfinished:
            engine.step()
            if engine.clock() > deadline:
                for user, round_ in self._asked(engine):
                    engine.abort(f"{user}.{round_}")
            for result in engine.take_results():
                user, round_ = (int(part) for part in result.request_id.split("."))
                turn = ChatTurn(user, round_, history[user], result)
                self.turns.append(turn)
                if on_turn is not None:
                    on_turn(turn)
                history[user] = len(said[user]) + len(result.tokens) - 1
                said[user] += result.tokens
                if result.finish_reason == "length" and round_ + 1 < self.rounds:
                    self._ask(engine, user, round_ + 1, said)
        return self.turns

    def _ask(self, engine: LabEngine, user: int, round_: int, said: dict[int, list[int]]) -> None:
        said[user] += question(self.model, self.question_tokens, self.seed, user, round_)
        engine.add(f"{user}.{round_}", said[user], self.output_tokens, ignore_eos=True)

    def _asked(self, engine: LabEngine) -> Iterator[tuple[int, int]]:
        ended = {(turn.user, turn.round) for turn in self.turns}
        for user in range(self.users):
            for round_ in range(self.rounds):
                if (user, round_) not in ended:
                    yield user, round_
