"""A request in the lab's engine, and what is known of it when it has ended."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["OnToken", "Phase", "Request", "Result"]

OnToken = Callable[[str, int, float], None]
"""Called with request id, token and time (seconds on the engine's clock), in order, at the end of the step."""


class Phase(enum.Enum):
    """WAITING → LOADING → PREFILL → DECODE → FINISHED; WAITING again when preempted; FINISHED at once by abort."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """What the engine keeps while a request lives.

    tokens        |<---------- prompt ---------->|<-- generated -->|
    K/V           |<------- computed ------->|<-- to compute ----->|     while decoding: all but the last token
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    max_new_tokens: int
    stop: frozenset[int]
    salt: str | None
    on_token: OnToken | None
    submitted: float
    phase: Phase = Phase.WAITING
    preempted: bool = False  # known to the cache manager, and to be resumed there
    computed: int = 0
    table: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    promised: int = 0
    arriving: bool = False  # the promised prefix comes by layers, and a pass may begin while it does
    promised_by_tier: dict[str, int] = field(default_factory=dict)
    stalled_since: float | None = None
    result: Result = field(init=False)

    def __post_init__(self) -> None:
        self.result = Result(self.request_id, self.prompt_tokens, self.submitted)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True)
class Result:
    """What became of a request. Times are seconds on the engine's clock (``time.perf_counter``)."""

    request_id: str
    prompt_tokens: int
    submitted: float
    finish_reason: str = ""
    """"stop" (an end token), "length", "abort", or "no room" (its blocks could not be had in time)."""
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by where their K/V came from at first admission; "computed" is the rest."""
    finished: float = 0.0
    preemptions: int = 0
    computed_tokens: int = 0
    """Rows of prompt and output whose K/V was computed and written."""
    recomputed_tokens: int = 0
    """Those of them that had been computed for this request before, and were lost to a preemption."""
    lost_tokens: int = 0
    """Tokens that a match promised and a load then failed to bring."""
    first_logits: npt.NDArray[np.float32] | None = None
    """Logits [vocab] that the first token was chosen from; kept on demand."""

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token."""
        return self.token_times[0] - self.submitted if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for fewer than two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)
