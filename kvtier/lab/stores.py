"""Disk stores that last as long as a measurement."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.lab.settings import BenchError

if TYPE_CHECKING:
    from kvtier.config import CacheConfig

__all__ = ["temporary_store", "with_store"]


@contextmanager
def temporary_store(parent: Path) -> Iterator[Path]:
    """A directory for the disk tier, removed with all that is in it however the run ends."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".kvtier-bench-", dir=parent))
    except OSError as error:
        raise BenchError(
            f"disk-path: {str(parent)!r}: {error.strerror}; expected a directory that can be written"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_store(config: CacheConfig, stack: ExitStack, parent: Path | None) -> CacheConfig:
    """``config`` with a disk tier in a temporary store below ``parent``, which goes when ``stack`` ends."""
    path = None if parent is None else stack.enter_context(temporary_store(parent))
    return config.model_copy(update={"disk": config.disk.model_copy(update={"path": path})})
