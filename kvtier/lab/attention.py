"""Attention over paged K/V: an attention function for transformers models that reads and writes a pool of blocks.

transformers lets an attention function be registered by name (``AttentionInterface``) and hands every unknown keyword
of ``model(...)`` down to it, so that all a step needs travels in one :class:`PagedStep` and there is no global state.
Its own continuous batching (``ContinuousBatchingManager``, ``PagedAttentionCache``) packs the sequences of a step
into one ragged row with one common mask; there the shape, and with it the rounding, of a matrix product depends on
who else is in the batch. Here a row's result depends on its own sequence only, which is what lets a cache prove that
a hit changes nothing.

The pool's layout is one tensor for each layer, [blocks, 2, kv_heads, block_size, head_dim]: K then V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ATTENTION_NAME", "KVPool", "PagedStep", "register"]

ATTENTION_NAME = "kvtier_paged"
_STEP = "kvtier_step"

Table = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Context:
    """One sequence as attention sees it: where its K/V lies, and how much of it there is."""

    pieces: torch.Tensor  # int64 [2 * kv_heads * blocks]: rows of KVPool's piece view, K first
    length: int  # tokens whose K/V is valid; what the last block holds behind it is never read
    width: int  # keys and values that attention is given: `length`, or more, the rest zeros behind the mask


@dataclass(frozen=True, slots=True)
class PagedStep:
    """All that one forward pass needs beside token ids and positions. Made once a step, used by every layer.

    rows          |--- phantom ---|=== written ===|~~~ padding ~~~|
                  0               first           last            width of the batch

    Phantom rows are those of a chunk whose K/V is in the cache already: they are computed again, because the shape of
    the batch must not depend on where a hit ended, and never written.
    """

    pool: KVPool
    first: int
    last: int
    targets: torch.Tensor  # int64 [2 * kv_heads * (last - first)]: rows of KVPool's token view, K first
    contexts: tuple[_Context, ...]
    mask: torch.Tensor | None  # prefill: additive [width, keys]; decode: none, every row has its own context
    arrival: Callable[[int], None] | None = None  # called with each layer before it is read, where it may not be there


class KVPool:
    """The K/V tensors of a model's layers, cut into blocks; the engine's own device memory.

    ``tensors``: for each layer a contiguous [blocks, 2, kv_heads, block_size, head_dim], all of one shape and dtype.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            raise ValueError("tensors: none given; expected one for each layer")
        shape = tuple(tensors[0].shape)
        if len(shape) != 5 or shape[1] != 2 or 0 in shape:
            raise ValueError(f"tensors: shape {shape}; expected [blocks, 2, kv_heads, block_size, head_dim]")
        for tensor in tensors:
            if tuple(tensor.shape) != shape or tensor.dtype != tensors[0].dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"tensors: {tuple(tensor.shape)} {tensor.dtype}; "
                    f"expected contiguous tensors of {shape} {tensors[0].dtype}"
                )
        self.tensors = tuple(tensors)
        self.blocks, _, self.kv_heads, self.block_size, self.head_dim = shape
        self.dtype, self.device = tensors[0].dtype, tensors[0].device
        # A token row is one head's K or V of one token, a piece that of one block: the unit of a gather.
        self._tokens = tuple(t.view(-1, self.head_dim) for t in tensors)
        self._pieces = tuple(t.view(-1, self.block_size * self.head_dim) for t in tensors)
        self._lanes = (np.arange(2)[:, None] * self.kv_heads + np.arange(self.kv_heads)[None, :]).astype(np.int64)
        self._work = torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def prefill_step(
        self,
        table: Table,
        start: int,
        width: int,
        cached: int,
        end: int,
        arrival: Callable[[int], None] | None = None,
    ) -> PagedStep:
        """The step of one chunk: rows are positions [start, start + width) of one sequence.

        Positions below ``cached`` are phantom, those from ``end`` on padding; the table must cover ``end`` tokens.
        ``arrival`` is called with each layer before its cached K/V is read; what it raises ends the pass.
        """
        if not 0 <= start <= cached < end <= start + width:
            raise ValueError(f"chunk [{start}, {start + width}) cannot compute tokens {cached} to {end}")
        positions = np.arange(cached, end)
        blocks = table[positions // self.block_size].astype(np.int64)
        keys = start + width
        context = self._context(table, end, keys)
        column = torch.arange(keys, device=self.device)
        row = torch.arange(start, start + width, device=self.device)
        mask = torch.zeros(width, keys, dtype=self.dtype, device=self.device)
        mask.masked_fill_(column[None, :] > row[:, None], float("-inf"))
        self._reserve(context)
        targets = self._targets(blocks, positions % self.block_size)
        return PagedStep(self, cached - start, end - start, targets, (context,), mask, arrival)

    def decode_step(self, tables: Sequence[Table], positions: npt.NDArray[np.int64]) -> PagedStep:
        """The step of one token for each of several sequences; row i is position ``positions[i]`` of sequence i."""
        last = [table[p // self.block_size] for table, p in zip(tables, positions, strict=True)]
        blocks = np.array(last, dtype=np.int64)
        contexts = tuple(self._context(t, int(p) + 1, int(p) + 1) for t, p in zip(tables, positions, strict=True))
        self._reserve(max(contexts, key=lambda c: len(c.pieces)))
        targets = self._targets(blocks, positions % self.block_size)
        return PagedStep(self, 0, len(tables), targets, contexts, None)

    def _targets(self, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> torch.Tensor:
        lanes = blocks[None, :] * (2 * self.kv_heads) + self._lanes.reshape(-1, 1)
        return torch.from_numpy((lanes * self.block_size + offsets[None, :]).reshape(-1)).to(self.device)

    def _context(self, table: Table, length: int, width: int) -> _Context:
        held = -(-length // self.block_size)
        if len(table) < held:
            raise ValueError(f"block table of {len(table)} blocks does not cover {length} tokens")
        slots = np.empty(-(-width // self.block_size), dtype=np.int64)
        slots[:held] = table[:held]
        slots[held:] = table[0]  # any readable block: overwritten by zeros before use
        pieces = slots[None, :] * (2 * self.kv_heads) + self._lanes.reshape(-1, 1)
        return _Context(torch.from_numpy(pieces.reshape(-1)).to(self.device), length, width)

    def _reserve(self, context: _Context) -> None:
        """One buffer for all layers and steps: a fresh one each time would cost page faults and leave the cache."""
        needed = len(context.pieces) * self.block_size * self.head_dim
        if self._work.numel() < needed:
            self._work = torch.empty(needed, dtype=self.dtype, device=self.device)

    def write(self, layer: int, step: PagedStep, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the K and V, [kv_heads, rows, head_dim] each, of the step's written rows."""
        rows = torch.stack((key[:, step.first : step.last], value[:, step.first : step.last]))
        self._tokens[layer].index_copy_(0, step.targets, rows.view(-1, self.head_dim))

    def read(self, layer: int, context: _Context) -> torch.Tensor:
        """K and V of a context, [2, kv_heads, width, head_dim], valid until the next read."""
        count = len(context.pieces)
        out = self._work[: count * self.block_size * self.head_dim].view(count, -1)
        torch.index_select(self._pieces[layer], 0, context.pieces, out=out)
        both = out.view(2, self.kv_heads, -1, self.head_dim)[:, :, : context.width]
        # Slots hold whatever was there before, NaN too, and 0 * NaN is NaN: a mask alone would let it through.
        both[:, :, context.length :] = 0
        return both


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a :class:`PagedStep` given as ``kvtier_step``.

    query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim] → [1, rows, heads, head_dim].
    """
    step: PagedStep | None = kwargs.get(_STEP)
    if step is None:
        raise ValueError(f"attention {ATTENTION_NAME!r} needs {_STEP}=PagedStep in the call of the model")
    for name in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: the model's attention uses it; only plain full attention is supported")
    pool, layer = step.pool, int(module.layer_idx)
    pool.write(layer, step, key[0], value[0])
    if step.arrival is not None:
        step.arrival(layer)
    if step.mask is not None:
        keys, values = pool.read(layer, step.contexts[0])
        out = functional.scaled_dot_product_attention(
            query, keys[None], values[None], attn_mask=step.mask[None, None], scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    # [rows, kv_heads, queries of one K/V head, head_dim]: grouped heads become rows, so K/V is read once
    grouped = query[0].transpose(0, 1).reshape(query.shape[2], pool.kv_heads, -1, pool.head_dim)
    out = torch.zeros_like(grouped)
    for row, context in enumerate(step.contexts):
        keys, values = pool.read(layer, context)
        out[row] = functional.scaled_dot_product_attention(
            grouped[row : row + 1], keys[None], values[None], scale=scaling
        )[0]
    return out.view(1, query.shape[2], -1, pool.head_dim), None


def register() -> None:
    """Make the function known to transformers under :data:`ATTENTION_NAME`; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def step_kwargs(step: PagedStep) -> dict[str, PagedStep]:
    """What to add to the model's call."""
    return {_STEP: step}
