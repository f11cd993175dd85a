"""The machine that a benchmark runs on: what it is, and where its disk is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import kvtier
from kvtier.lab.results import Machine

__all__ = ["describe", "filesystem"]

_PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """Where a directory lies: the kind of file system, what it is on, and the bytes that are free there."""

    kind: str
    device: str
    free: int

    @property
    def in_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs")


def filesystem(directory: Path) -> Filesystem:
    """The file system of an existing directory."""
    where = directory.resolve()
    best = ("", "unknown", "unknown")
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            device, mount, kind = line.split(" ", 3)[:3]
            mount = mount.encode().decode("unicode_escape")  # spaces are written \040
            if (where == Path(mount) or Path(mount) in where.parents) and len(mount) >= len(best[0]):
                best = (mount, kind, device)
    return Filesystem(best[1], best[2], shutil.disk_usage(where).free)


def describe(disk: Path | None) -> Machine:
    """The machine, with the disk that ``disk`` is a directory of."""
    where = "none"
    if disk is not None:
        found = filesystem(disk)
        where = f"{found.device}, {found.kind}"
    software = {"python": platform.python_version(), "kvtier": kvtier.__version__}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            software[package] = importlib.metadata.version(package)
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_total_memory(),
        os=f"{platform.system()} {platform.release()}",
        gpu=_gpu(),
        disk=where,
        software=software,
    )


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
