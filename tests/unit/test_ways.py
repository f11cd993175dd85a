"""A page comes by the way that its places allow, and by none where none can be trusted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvtier.catalog import Residency, Tier
from kvtier.ways import Plan, plans

ABSENT, FILLING, READY, DRAINING = Residency


@pytest.mark.parametrize("offline", [False, True])
def test_every_page_has_one_way_to_the_device(offline: bool) -> None:
    places = list(product(Residency, repeat=3))
    residency = np.zeros((len(places), 4), np.uint8)
    residency[:, [Tier.DEVICE, Tier.HOST, Tier.DISK]] = places
    ways = [Plan(way) for way in plans(residency, disk_offline=offline)]
    for (device, host, disk), way in zip(places, ways, strict=True):
        assert (way is Plan.THERE) == (device is READY)
        if device is DRAINING:
            assert way is Plan.NEVER  # its slot is another copy's until that has ended
        if way is Plan.ONBOARD:
            assert (device, host) == (ABSENT, READY)
        if way is Plan.STAGE:
            assert (device, host, disk) == (ABSENT, ABSENT, READY)
            assert not offline
        if way is Plan.WAIT:  # for a transfer that is under way
            assert device is FILLING or (device is ABSENT and host is FILLING and disk is READY)
        if device is ABSENT and host is READY:
            assert way is Plan.ONBOARD
        if (device, host, disk) == (ABSENT, ABSENT, READY) and not offline:
            assert way is Plan.STAGE


def test_nothing_is_planned_for_no_pages() -> None:
    assert not len(plans(np.zeros((0, 4), np.uint8), disk_offline=False))
