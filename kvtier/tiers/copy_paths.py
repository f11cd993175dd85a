"""By which path a GPU's pages cross the link, and how their ends are noticed (`kvtier.tiers.copy_ends`): measured for
this device and this geometry, or a default that says so.

    pieces   one copy for each contiguous piece of a page
    batch    the same pieces in one list for the driver
    direct   a kernel reads or writes the pinned host pages itself
    staged   a kernel packs pages in device memory, and runs of neighbouring pages are one copy

Which is fastest depends on the size of the pieces, the link and the driver, so nothing here pretends to know it:
`measure` finds it out, `store` keeps it in a profile, and `choose` looks there.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import _core
from kvtier.tiers.copy_ends import ENDS, Noticing, better, measure_ends

if TYPE_CHECKING:
    from kvtier.config import CudaConfig
    from kvtier.tiers.device import DevicePool
    from kvtier.tiers.host import HostArena

__all__ = ["PATHS", "Choice", "Rates", "choose", "measure", "store"]

PATHS = ("pieces", "batch", "direct", "staged")
SCHEMA = "kvtier.copy-paths/1"
_LONGEST_PROFILE = 1 << 20  # bytes of a file that is read; a real one has a few hundred for each geometry


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured for one device and one shape of pages: bytes per second by path, in each direction, and what
    noticing the ends costs (empty: of a profile that says nothing about it)."""

    device: str
    payload_bytes: int
    segments: int
    date: str
    offload: dict[str, float]
    onboard: dict[str, float]
    ends: dict[str, Noticing] = field(default_factory=dict)

    def fits(self, pool: DevicePool) -> bool:
        """Whether it was measured for this pool's device and pieces."""
        found = (self.device, self.payload_bytes, self.segments)
        return pool.cuda is not None and found == (pool.cuda.name, pool.payload_bytes, pool.segments)


@dataclass(frozen=True, slots=True)
class Choice:
    """A path for each direction and a way to notice the ends, and why."""

    offload: str
    onboard: str
    reason: str
    ends: str
    ends_reason: str

    def describe(self) -> str:
        return (
            f"GPU copies: offload {self.offload}, onboard {self.onboard} ({self.reason}), "
            f"ends by {self.ends} ({self.ends_reason})"
        )


def choose(config: CudaConfig, pool: DevicePool) -> Choice:
    """The paths and the ends for a pool: as configured, else the best of the profile, else the default.

    Raises ValueError for a profile that cannot be read.
    """
    rates = None
    if config.profile is not None:
        rates = next((entry for entry in load(config.profile) if entry.fits(pool)), None)
    picked, reason = _paths(config, pool, rates)
    ends, ends_reason = _ends(config, rates)
    return Choice(picked["offload"], picked["onboard"], reason, ends, ends_reason)


def _paths(config: CudaConfig, pool: DevicePool, rates: Rates | None) -> tuple[dict[str, str], str]:
    default = "pieces" if pool.segments == 1 else "direct"
    picked = {"offload": default, "onboard": default}
    kind = "contiguous pages" if pool.segments == 1 else f"{pool.segments} pieces a page"
    if rates is not None:
        picked = {lane: max(table, key=table.__getitem__) for lane, table in _tables(rates).items()}
        best = ", ".join(f"{lane} {max(table.values()) / 1e9:.1f} GB/s" for lane, table in _tables(rates).items())
        reason = f"fastest when measured on {rates.date}: {best}"
    elif config.profile is not None:
        reason = f"default for {kind}; {str(config.profile)!r} has nothing for this device and geometry"
    else:
        reason = f"default for {kind}, not measured on this machine"
    forced = {lane: path for lane, path in (("offload", config.offload), ("onboard", config.onboard)) if path != "auto"}
    if forced:
        others = [lane for lane in picked if lane not in forced]
        reason = "as configured" + (f"; {others[0]}: {reason}" if others else "")
    return picked | forced, reason


def _ends(config: CudaConfig, rates: Rates | None) -> tuple[str, str]:
    if config.ends != "auto":
        return config.ends, "as configured"
    if rates is None or not rates.ends:
        return "poll", "default, not measured on this machine"
    way = better(rates.ends)
    costs = "; ".join(
        f"{name} {each.wait_s * 1e6:.0f} us a page, {each.processor:.0%} of a core" for name, each in rates.ends.items()
    )
    return way, f"better when measured on {rates.date}: {costs}"


def _tables(rates: Rates) -> dict[str, dict[str, float]]:
    return {"offload": rates.offload, "onboard": rates.onboard}


def measure(
    pool: DevicePool,
    arena: HostArena,
    *,
    rounds: int = 5,
    bytes_a_round: int = 256 << 20,
    processor_share: float = 0.08,
) -> Rates:
    """Measure every path in both directions, interleaved, then both ways to notice the ends by the fastest path for
    loads; keep the median of ``rounds``. Overwrites both pools.

    Raises ValueError for a pool that is not on a CUDA device, CudaError when a copy fails.
    """
    if pool.cuda is None:
        raise ValueError("pool: its pages are in host memory, which the CPU copies; expected one on a CUDA device")
    pinned = _core.PinnedArena(pool.cuda.native, arena.native)
    pinned.wait()
    pages = min(pool.slots, pinned.pinned, max(1, bytes_a_round // pool.payload_bytes))
    if pages == 0:
        raise _core.CudaError(f"nothing of the host tier could be pinned: {pinned.note()}")
    spread = np.random.default_rng(1)  # neighbours in neither pool, as after some hours of service
    slots = spread.permutation(pool.slots)[:pages].astype(np.uint32)
    targets = spread.permutation(pinned.pinned)[:pages].astype(np.uint32)
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):  # the first warms up
        for path in PATHS:
            copies = _core.CudaCopies(
                pool.cuda.native, pinned, offload=path, onboard=path, processor_share=processor_share
            )
            for lane in ("offload", "onboard"):
                took = _core.measure_path(copies, pool.native, arena.native, lane == "offload", slots, targets, 1)
                if turn:
                    seconds.setdefault((lane, path), []).append(took)
    rate = {key: pages * pool.payload_bytes / statistics.median(took) for key, took in seconds.items()}
    onboard = {path: rate["onboard", path] for path in PATHS}
    fastest = max(onboard, key=onboard.__getitem__)
    ends = measure_ends(
        pool.cuda.native, pool.native, arena.native, pinned,
        path=fastest, rounds=rounds, pages=pages, processor_share=processor_share,
    )  # fmt: skip
    return Rates(
        device=pool.cuda.name,
        payload_bytes=pool.payload_bytes,
        segments=pool.segments,
        date=datetime.now(UTC).date().isoformat(),
        offload={path: rate["offload", path] for path in PATHS},
        onboard=onboard,
        ends=ends,
    )


def store(profile: Path, rates: Rates) -> None:
    """Put ``rates`` into the profile, whole or not at all, in the place of those of the same device and pages."""
    same = (rates.device, rates.payload_bytes, rates.segments)
    kept = [r for r in load(profile) if (r.device, r.payload_bytes, r.segments) != same] if profile.exists() else []
    text = json.dumps({"schema": SCHEMA, "rates": [asdict(entry) for entry in (*kept, rates)]}, indent=1)
    handle, name = tempfile.mkstemp(prefix=f".{profile.name}-", dir=profile.parent)  # 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.replace(name, profile)
    except BaseException:
        os.unlink(name)
        raise


def load(profile: Path) -> list[Rates]:
    """What a profile holds. Raises ValueError naming the file and what is wrong with it."""
    try:
        with profile.open() as file:
            text = file.read(_LONGEST_PROFILE + 1)
    except OSError as error:
        raise ValueError(
            f"cuda.profile: {str(profile)!r}: {error.strerror}; expected a profile of copy paths"
        ) from None
    try:
        if len(text) > _LONGEST_PROFILE:
            raise ValueError(f"longer than {_LONGEST_PROFILE} bytes")
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return [_rates(entry) for entry in data["rates"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"cuda.profile: {str(profile)!r}: {reason}; expected a profile of copy paths") from None


def _rates(entry: dict[str, Any]) -> Rates:
    tables = []
    for lane in ("offload", "onboard"):
        table = {str(path): float(rate) for path, rate in entry[lane].items()}
        if not table or not set(table) <= set(PATHS) or not min(table.values()) > 0:
            raise ValueError(f"{lane} {entry[lane]!r}")
        tables.append(table)
    ends = {way: Noticing(float(e["wait_s"]), float(e["processor"])) for way, e in entry.get("ends", {}).items()}
    if not set(ends) <= set(ENDS) or not all(each.wait_s > 0 and each.processor >= 0 for each in ends.values()):
        raise ValueError(f"ends {entry['ends']!r}")
    return Rates(
        device=str(entry["device"]),
        payload_bytes=int(entry["payload_bytes"]),
        segments=int(entry["segments"]),
        date=str(entry["date"]),
        offload=tables[0],
        onboard=tables[1],
        ends=ends,
    )
