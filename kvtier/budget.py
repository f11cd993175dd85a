"""What a configuration takes from the machine, and what the machine allows.

The host tier takes, in bytes, at most

    slots × page               page = payload rounded up to 4 KiB, slots = ⌊host.size / page⌋, so never above host.size
    + 4 MiB                    the mapping starts and ends on huge pages of 2 MiB
    + slots × 8                a checksum for each page
    + catalog                  allocated once; Catalog.memory_bytes says how much
    + whatever else the caller names (queues, staging)

and the disk tier ⌊disk.size / page⌋ × page for its slab plus a small record for each page. `check_memory` compares the
sum with what the system and every control group above this process would still give.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config import ConfigError, format_size, readable_size

PAGE_ALIGNMENT = 4096
HUGE_PAGE = 2 << 20
CHECKSUM_BYTES = 8
_UNLIMITED = 1 << 60  # v1 control groups say "no limit" with a number near 2**63


def page_bytes(payload_bytes: int) -> int:
    """Bytes of a page in host memory and on disk: its payload with the padding."""
    if payload_bytes < 1:
        raise ValueError(f"payload_bytes: {payload_bytes}; expected the bytes of one block, above zero")
    return -(-payload_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def slots_in(key: str, size: int, payload_bytes: int) -> int:
    """How many whole pages fit into `size` bytes. Raises ConfigError, naming `key`, where not even one does."""
    page = page_bytes(payload_bytes)
    if size < page:
        raise ConfigError(f"{key}: {format_size(size)} holds no page; expected at least {format_size(page)}, one page")
    return size // page


@dataclass(frozen=True)
class MemoryBound:
    """An upper bound on the host memory that a cache takes, in bytes, by part."""

    pages: int
    rounding: int
    checksums: int
    others: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.pages + self.rounding + self.checksums + sum(self.others.values())

    def describe(self) -> str:
        """One line: the total and its parts."""
        parts = {"pages": self.pages, "rounding": self.rounding, "checksums": self.checksums} | self.others
        return (
            f"{readable_size(self.total)} ({', '.join(f'{name} {readable_size(n)}' for name, n in parts.items() if n)})"
        )


def memory_bound(host_size: int, payload_bytes: int, **others: int) -> MemoryBound:
    """The formula above for a host tier of `host_size` bytes; `others` are parts known elsewhere: `catalog=...`."""
    slots = slots_in("host.size", host_size, payload_bytes)
    return MemoryBound(slots * page_bytes(payload_bytes), 2 * HUGE_PAGE, slots * CHECKSUM_BYTES, others)


@dataclass(frozen=True)
class Allowance:
    """What this process may still take."""

    available: int  # bytes that the system would give without swapping
    total: int  # bytes of memory that the machine has
    group_left: int | None  # bytes until the tightest control group's limit; None: no limit
    group_limit: int | None  # that limit

    @property
    def bytes(self) -> int:
        return self.available if self.group_left is None else min(self.available, self.group_left)

    @property
    def limited_by(self) -> str:
        if self.group_left is not None and self.group_left < self.available:
            return f"the control group's limit of {readable_size(self.group_limit or 0)}"
        return f"the machine's {readable_size(self.total)}"


def allowance(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Allowance:
    """Reads the system's and the control groups' answer, versions 1 and 2; a file that is absent limits nothing."""
    info = _numbers(proc / "meminfo")
    total = info.get("MemTotal", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024) * 1024
    available = info.get("MemAvailable", total // 1024) * 1024
    left = [(limit - used, limit) for limit, used in _group_limits(proc, groups) if limit < _UNLIMITED]
    if not left:
        return Allowance(available, total, None, None)
    tightest = min(left)
    return Allowance(available, total, max(tightest[0], 0), tightest[1])


def check_memory(bound: MemoryBound, allowed: Allowance | None = None) -> str | None:
    """Raises ConfigError when `bound` cannot be had; returns a warning when it takes nearly all of what is left."""
    allowed = allowance() if allowed is None else allowed
    if bound.total > allowed.bytes:
        raise ConfigError(
            f"host.size: the cache needs {bound.describe()}, but {readable_size(allowed.bytes)} are left of "
            f"{allowed.limited_by}; expected a smaller host.size"
        )
    if bound.total > allowed.bytes * 0.9:
        return f"host memory: {bound.describe()} is over 90 % of the {readable_size(allowed.bytes)} that are left"
    return None


def _numbers(path: Path) -> dict[str, int]:
    """`name: 12 kB` and `name 12` lines as numbers."""
    found = {}
    for line in (_read(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every control group above this process; page cache that can go at once is not used."""
    for line in (_read(proc / "self" / "cgroup") or "0::/").splitlines():
        number, controllers, name = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            root, files = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, files = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the name is often one that only the host can see: what is mounted at the root is ours then.
        folder = root / name.strip("/")
        for place in (folder, *folder.parents):
            limit, used = _read(place / files[0]), _read(place / files[1])
            if limit and used and limit.strip().isdigit() and used.strip().isdigit():
                reclaimable = _numbers(place / "memory.stat").get(files[2], 0)
                yield int(limit), max(int(used) - reclaimable, 0)
            if place == root:
                break
