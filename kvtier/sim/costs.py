"""A cost model that has seen enough: to compute a block and to load one on either lane take about as long."""

from __future__ import annotations

import numpy as np

from kvtier.costmodel import CostModel
from kvtier.messages import Completion, HopReport

__all__ = ["known_costs"]

_PAGE_SECONDS = 4e-3


def known_costs(page_bytes: int, block_size: int) -> CostModel:
    """What the simulations of choices begin with; what they see later is learnt on top."""
    costs = CostModel(page_bytes)
    status, now = np.ones((1, 1), np.uint8), 1.0
    for lane in ("stage", "onboard"):
        for pages in (1, 4, 2, 8, 3, 6):
            size, seconds = pages * page_bytes, pages * _PAGE_SECONDS
            hop = HopReport(lane, size, 0.0, seconds, now, now + seconds, size)
            costs.completed(Completion(1, True, status, (hop,), now, now + seconds))
            now += 2 * seconds
    for blocks in (1, 4, 2, 8, 3, 6):
        costs.observe_prefill(blocks * block_size, 0, blocks * _PAGE_SECONDS)
    return costs
