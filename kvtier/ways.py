"""Ways: how a page gets to the device from where it is now, looked up by its residency in each tier."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.catalog import Residency
from kvtier.enums import direct

__all__ = ["Plan", "Plans", "plans"]

Plans = npt.NDArray[np.uint8]
"""Of blocks: uint8 [blocks] of Plan."""


@direct
class Plan(IntEnum):
    THERE = 0
    WAIT = 1
    """Another request's transfer brings it."""
    ONBOARD = 2
    STAGE = 3
    NEVER = 4


def _plan(device: int, host: int, disk: int, disk_offline: bool) -> Plan:
    if device != Residency.ABSENT:
        return {Residency.FILLING: Plan.WAIT, Residency.READY: Plan.THERE}.get(Residency(device), Plan.NEVER)
    if host == Residency.READY:
        return Plan.ONBOARD
    if disk == Residency.READY and host == Residency.FILLING:
        return Plan.WAIT
    return Plan.STAGE if disk == Residency.READY and host == Residency.ABSENT and not disk_offline else Plan.NEVER


_WEIGHTS = np.array([16, 4, 1, 0], np.uint8)  # of the residency in each tier, in a number from 0 to 63
_TABLES = [
    np.array([_plan(n // 16, n // 4 % 4, n % 4, offline) for n in range(64)], np.uint8) for offline in (False, True)
]


def plans(residency: npt.NDArray[np.uint8], *, disk_offline: bool) -> Plans:
    """For blocks with this ``residency`` by Tier, uint8 [blocks, 4]."""
    found: Plans = _TABLES[disk_offline][residency @ _WEIGHTS]
    return found
