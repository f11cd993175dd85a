"""A model whose compute is a clock: it takes the time that a pass would take and fills nothing in.

Everything around it is real — engine, control plane, pages, lanes — so the costs of moving and deciding are measured
against a prefill speed of one's choosing, on a machine that has no accelerator. Its words mean nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtier.geometry import KVGeometry
from kvtier.lab.attention import KVPool
from kvtier.lab.model import LAYOUT
from kvtier.namespace import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.lab.attention import PagedStep

__all__ = ["PacedModel"]

_ASKING_S = 5e-5  # an answer that took longer was waited for


@dataclass(slots=True)
class PacedModel:
    """Takes the place of :class:`kvtier.lab.model.LabModel` in the lab's engine.

    A pass of r rows behind c tokens takes ``pass_s + r · token_s + r · c · pair_s`` seconds. K/V per token:
    ``layers · 2 · kv_heads · head_dim`` half-precision numbers, 4 KiB as it stands.
    """

    token_s: float
    pass_s: float = 5e-4
    pair_s: float = 0.0
    layers: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 32768
    context_limit: int = 1 << 20
    name: str = "paced"
    revision: str = "1"
    dtype: torch.dtype = torch.bfloat16
    eos_tokens: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def geometry(self, block_size: int) -> KVGeometry:
        return KVGeometry(
            layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype="bfloat16",
            block_size=block_size, layout=LAYOUT,
        )  # fmt: skip

    def namespace(self, block_size: int, salt: str | None = None) -> Namespace:
        return Namespace(
            model=self.name, revision=self.revision, dtype="bfloat16", rope={}, attention="paced", salt=salt,
            layout=self.geometry(block_size).layout_tag, block_size=block_size,
        )  # fmt: skip

    def new_pool(self, blocks: int, block_size: int) -> KVPool:
        shape = (blocks, 2, self.kv_heads, block_size, self.head_dim)
        return KVPool([torch.zeros(shape, dtype=self.dtype) for _ in range(self.layers)])

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep, logits: int | None
    ) -> torch.Tensor | None:
        """Let the time of the pass go by. The logits choose token 0."""
        began = time.perf_counter()
        rows = len(tokens)  # with padding, as a real pass computes it
        seconds = self.pass_s + rows * self.token_s + rows * int(positions[0]) * self.pair_s
        if step.arrival is None:
            time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        else:
            self._by_layer(step.arrival, began, seconds / self.layers)
        return None if logits is None else torch.zeros(rows if logits < 0 else 1, 8)

    def _by_layer(self, arrival: Callable[[int], None], now: float, each: float) -> None:
        """A layer begins when the one before has ended and its K/V is there."""
        for layer in range(self.layers):
            asked = time.perf_counter()
            arrival(layer)
            there = time.perf_counter()
            now = (max(now, there) if there - asked > _ASKING_S else now) + each
            time.sleep(max(0.0, now - there))
