"""The disk tier's pool: page-sized slots in a preallocated file, and a table that remembers which page each one holds.

Pages are read and written by the mover; this module opens the store, says what it holds after a restart and what it
costs. `docs/` describes the files; their layout is defined in csrc/io/disk_format.hpp.
"""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from kvtier import _core, content
from kvtier.config import ConfigError, format_size, parse_size, readable_size

if TYPE_CHECKING:
    from kvtier.config import CacheConfig
    from kvtier.geometry import KVGeometry

Io = Literal["auto", "io_uring", "threads"]
Direct = Literal["auto", "on", "off"]

INDEX_BYTES = 32  # of memory for each slot: what the native part must know to verify what it reads
_MOST_SLOTS = 2**32 - 2


def slots_in(size: int, payload_bytes: int, label_bytes: int, journal_entries: int = 4096) -> int:
    """The most slots whose pages, records and fixed files together take no more than `size` bytes on disk; may be 0."""
    return int(_core.DiskFootprint(payload_bytes, label_bytes, journal_entries).slots_in(size))


class DiskStore:
    """`slots` pages of `payload_bytes`, padded to `page_bytes` (a multiple of 4096), in the directory `path`.

    Give `slots`, or `size`: bytes that all of the store's files together may take ("64GiB" or a number). They are set
    aside when the store is made, and it never takes more than `slots * (page_bytes + record_bytes) + fixed_bytes`. The
    directory must exist, and belongs to one store and one process at a time (each rank has its own); a forked child
    shares the hold on it. The native part uses 32 bytes of memory per slot.

    `label_bytes` and `geometry_tag` (32 bytes) say what a page is; a store that was made for others is refused.
    `io` and `direct` choose the way to the disk; "auto" tries a real read and write, and `describe()` says what works.
    Half of `journal_entries` namespaces can be invalidated one by one; beyond that all generations rise together.

    Raises :class:`kvtier.config.ConfigError` with one line that names the key (`disk.path`, `disk.size`, ...), the
    value and what would be accepted; ValueError for the arguments that are no settings; OSError when the disk itself
    fails. Nothing that exists is deleted, and a store that could not be made leaves nothing behind.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        payload_bytes: int,
        label_bytes: int,
        geometry_tag: bytes,
        slots: int | None = None,
        size: int | str | None = None,
        rank: int = 0,
        world: int = 1,
        io: Io = "auto",
        direct: Direct = "auto",
        journal_entries: int = 4096,
    ) -> None:
        for name, value, most in (
            ("payload_bytes", payload_bytes, 1 << 30),
            ("label_bytes", label_bytes, 1 << 20),
            ("journal_entries", journal_entries, 1 << 20),
        ):
            _check(name, value, most)
        if (slots is None) == (size is None):
            raise ValueError(f"disk store: slots={slots!r} and size={size!r}; exactly one of the two is needed")
        if slots is None:
            assert size is not None
            slots = _slots_for(size, payload_bytes, label_bytes, journal_entries)
        _check("slots", slots, _MOST_SLOTS)
        for name, value in (("rank", rank), ("world", world)):
            _check(name, value, 2**32 - 1, least=0)
        if io not in ("auto", "io_uring", "threads"):
            raise ConfigError(f'disk.io: "{io}"; expected "auto", "io_uring" or "threads"')
        try:
            native = _core.DiskStore(
                os.fspath(path),
                slots,
                payload_bytes,
                label_bytes,
                geometry_tag,
                rank=rank,
                world=world,
                direct=direct,
                journal_entries=journal_entries,
            )
        except MemoryError:
            index = readable_size(slots * INDEX_BYTES)
            given = f"{format_size(parse_size(size))}, " if size is not None else ""
            raise ConfigError(
                f"disk.size: {given}{slots} pages need {index} of memory to verify what is read; "
                "expected a smaller size"
            ) from None
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise _explained(path, error) from None
        if io == "io_uring" and not native.io.uring:
            raise ConfigError(f'disk.io: "io_uring": {native.io.why}; expected "auto" or "threads"')
        self._native: _core.DiskStore | None = native
        self.path = Path(path)
        self.io: Io = io
        self.slots: int = native.slots
        self.page_bytes: int = native.page_bytes
        self.payload_bytes: int = native.payload_bytes
        self.label_bytes: int = native.label_bytes
        self.record_bytes: int = native.footprint.record_bytes
        self.bytes: int = native.footprint.bytes(self.slots)  # on disk, all files together; never more
        self.adopted: int = native.adopted  # pages that were found valid when the store was opened
        self.notes: str = native.notes  # what was found damaged and mended then; one line, or ""

    @classmethod
    def open(
        cls,
        config: "CacheConfig",
        geometry: "KVGeometry",
        *,
        label_bytes: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Self:
        """The store that `config.disk` describes, for pages of `geometry` labelled by their content, or else by
        `label_bytes` bytes.

        Raises ConfigError and OSError as the constructor does, and ConfigError when no path is configured.
        """
        if config.disk.path is None:
            raise ConfigError("disk.path: not set; expected an existing, writable directory on a disk")
        return cls(
            config.disk.path,
            payload_bytes=geometry.payload_bytes,
            label_bytes=content.label_bytes(geometry.block_size) if label_bytes is None else label_bytes,
            geometry_tag=geometry.fingerprint,
            size=config.disk.size,
            rank=rank,
            world=world,
            io=config.disk.io,
            direct=config.disk.direct,
        )

    @property
    def native(self) -> "_core.DiskStore":
        """For the mover. ValueError once the store is closed."""
        if self._native is None:
            raise ValueError(f"disk store {self.path} is closed")
        return self._native

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the file system has set aside for the store's files, by its own account."""
        return int(self.native.allocated_bytes)

    def records(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """What the store holds: slots uint32[n] and identities uint8[n, identity_bytes], the oldest record first.

        For `Catalog.restore` after opening. Reads the table from disk; raises OSError when that fails.
        """
        slots, identities = self.native.scan()
        return slots, identities

    def clear(self, slots: npt.ArrayLike) -> None:
        """Forget what these slots hold, for pages that no catalog adopted. ValueError for a slot that is not there."""
        wanted = np.atleast_1d(np.asarray(slots))
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= self.slots):
            raise ValueError(f"disk slot {wanted.min()} to {wanted.max()}; expected 0 to {self.slots - 1}")
        for slot in wanted:
            failed = self.native.clear_record(int(slot))
            if failed < 0:
                raise OSError(-failed, f"cannot clear the record of slot {slot} in {self.path}: {os.strerror(-failed)}")

    def holds(self, slot: int, identity: npt.NDArray[np.uint8]) -> bool:
        """Whether a valid record says that the slot holds this page (uint8[identity_bytes])."""
        return self.native.checksum_for(slot, np.ascontiguousarray(identity)) != 0

    def generation(self, space: bytes) -> int:
        """The valid generation of a namespace (its 32-byte fingerprint); 0 until it is first invalidated."""
        return int(self.native.generation(space))

    def invalidate(self, space: bytes | None) -> int:
        """Make every page of `space` (None: of all namespaces) invalid, also those that are being written.

        Returns the new generation once it is durable. Raises OSError when it could not be made durable: it is in force
        in this process, but a restart may bring the old pages back.
        """
        return int(self.native.invalidate(space))

    def describe(self) -> str:
        """One line for people: size, pages, the way to the disk and why, and what was found at opening."""
        native = self.native
        way = native.io.why
        if native.io.direct and not native.direct:
            way += ', but direct is "off": buffered I/O'
        if native.io.uring and self.io == "threads":
            way += ', but io is "threads"'
        found = f", {self.adopted} pages found" if self.adopted else ""
        notes = f" ({self.notes})" if self.notes else ""
        pages = f"{self.slots} pages of {readable_size(self.page_bytes)}"
        return f"disk: {readable_size(self.bytes)}, {pages} in {self.path}, {way}{found}{notes}"

    def close(self) -> None:
        """Give the directory up. Close the mover first, and leave the store open when an I/O of its never returned."""
        if self._native is not None:
            self._native.close()
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(name: str, value: object, most: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"disk store: {name} is {value!r}; expected {least} to {most}")


def _slots_for(size: int | str, payload_bytes: int, label_bytes: int, journal_entries: int) -> int:
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise ConfigError(f"disk.size: {size!r}: {error}") from None
    footprint = _core.DiskFootprint(payload_bytes, label_bytes, journal_entries)
    slots = int(footprint.slots_in(size_bytes))
    if slots < 1:
        raise ConfigError(
            f"disk.size: {format_size(size_bytes)} holds no page; expected at least {format_size(footprint.bytes(1))}, "
            f"one page of {format_size(footprint.page_bytes)} and the store's own files"
        )
    return min(slots, _MOST_SLOTS)


# What a file operation says of a directory that was ill chosen, and not of a disk that fails.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNFIT = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.ENXIO, errno.EOPNOTSUPP),
}


def _explained(path: str | Path, error: OSError) -> ConfigError | OSError:
    """The one line for a file operation that failed while the store was opened."""
    text = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return ConfigError(f"disk.size: {text}; expected a smaller size, or more free space in {path}")
    if error.errno in _UNFIT:
        return ConfigError(
            f"disk.path: {path}: {text}; expected a directory on a disk in which this user may make files, and in it "
            "nothing but a store"
        )
    return OSError(error.errno, f"disk.path: {path}: {text}")
