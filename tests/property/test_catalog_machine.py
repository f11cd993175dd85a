"""Any sequence of calls on the catalog, against a plain model that keeps the bytes of every slot."""

from __future__ import annotations

from typing import ClassVar

from catalog_content import ContentRules
from catalog_exchange import ExchangeRules
from catalog_upkeep import UpkeepRules
from hypothesis import settings

from kvtier.catalog import Tier


class HostOnly(ExchangeRules, UpkeepRules):
    tiers: ClassVar = {Tier.HOST: 5}
    paths: ClassVar = [[Tier.DEVICE, Tier.HOST], [Tier.HOST, Tier.DEVICE]]


class ThreeTiers(ExchangeRules, UpkeepRules):
    tiers: ClassVar = {Tier.DEVICE: 3, Tier.HOST: 4, Tier.DISK: 5}
    paths: ClassVar = [
        [Tier.DEVICE, Tier.HOST],
        [Tier.HOST, Tier.DEVICE],
        [Tier.HOST, Tier.DISK],
        [Tier.DISK, Tier.HOST],
        [Tier.DISK, Tier.HOST, Tier.DEVICE],
        [Tier.DEVICE, Tier.HOST, Tier.DISK],
    ]


class HostOnlyByHash(HostOnly):
    labels: ClassVar = "hash"


class ThreeTiersByHash(ThreeTiers):
    labels: ClassVar = "hash"


class HostOnlyByContent(ContentRules, HostOnly):
    pass


class ThreeTiersByContent(ContentRules, ThreeTiers):
    pass


_SETTINGS = settings(max_examples=30, stateful_step_count=40)
TestHostOnly = HostOnly.TestCase
TestThreeTiers = ThreeTiers.TestCase
TestHostOnlyByHash = HostOnlyByHash.TestCase
TestThreeTiersByHash = ThreeTiersByHash.TestCase
TestHostOnlyByContent = HostOnlyByContent.TestCase
TestThreeTiersByContent = ThreeTiersByContent.TestCase
for _case in (
    *(TestHostOnly, TestThreeTiers, TestHostOnlyByHash, TestThreeTiersByHash),
    *(TestHostOnlyByContent, TestThreeTiersByContent),
):
    _case.settings = _SETTINGS
del _case  # or it would be collected once more
