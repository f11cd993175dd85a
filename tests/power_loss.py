"""Every state in which a loss of power may leave a disk store's files, from a log of what was written and synced.

What was synced is there. Of what was not, any 512-byte sectors are, in any order; a file that grew may be short again,
and of the changes to the directory a first part has happened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
Event = tuple[str, int, int, str, str, bytes]


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, bytes), or (size, None)

    def sync(self) -> None:
        for number, data in self.pending:
            _apply(self.durable, number, data)
        self.pending.clear()


def _apply(content: bytearray, number: int, data: bytes | None) -> None:
    if data is None:
        del content[number:]
        content.extend(bytes(number - len(content)))
    else:
        content.extend(bytes(max(0, number + len(data) - len(content))))
        content[number : number + len(data)] = data


class Disk:
    """What is durable and what is not, after the events played so far; starts as the files of ``folder`` if given."""

    def __init__(self, folder: Path | None = None) -> None:
        self._files: list[_File] = []
        self._by_inode: dict[int, int] = {}
        self._names: dict[str, int] = {}  # durable
        self._changes: list[tuple[str, str | None, int]] = []  # of the directory: (name, new name or None: gone, file)
        self._now: dict[str, int] = {}
        if folder is not None:
            for path in folder.iterdir():
                self._files.append(_File(bytearray(path.read_bytes())))
                self._names[path.name] = self._now[path.name] = len(self._files) - 1
                self._by_inode[path.stat().st_ino] = len(self._files) - 1

    def play(self, event: Event) -> None:
        what, inode, number, path, to, data = event
        name, target = Path(path).name, Path(to).name
        if what in ("write", "resize", "sync") and inode not in self._by_inode:
            return  # of the probe's file, which has no name
        if what == "open":
            self._open(inode, name, new=bool(number))
        elif what == "write":
            self._files[self._by_inode[inode]].pending.append((number, data))
        elif what == "resize":
            self._files[self._by_inode[inode]].pending.append((number, None))
        elif what == "sync":
            self._files[self._by_inode[inode]].sync()
        elif what == "sync_directory":
            self._names = dict(self._now)
            self._changes.clear()
        elif what == "rename":
            self._change(name, target, self._now.pop(name))
        elif what == "remove" and name in self._now:
            self._change(name, None, self._now.pop(name))

    def _open(self, inode: int, name: str, *, new: bool) -> None:
        known = self._now.get(name)
        if known is not None and self._by_inode.get(inode) == known:
            if new:
                self._files[known].pending.append((0, None))
            return
        self._files.append(_File())
        self._by_inode[inode] = len(self._files) - 1
        self._change(name, name, len(self._files) - 1)

    def _change(self, name: str, new: str | None, file: int) -> None:
        self._changes.append((name, new, file))
        if new is not None:
            self._now[new] = file

    def unsynced(self) -> int:
        return sum(len(file.pending) for file in self._files)

    def lose_power(self, rng: random.Random, folder: Path, keep: float | None = None) -> None:
        """Put into ``folder``, which is empty, one of the states that the files may be found in; ``keep`` is the share
        of what was not synced that survives, by default one of several for each file."""
        names = dict(self._names)
        for name, new, file in self._changes[: rng.randint(0, len(self._changes))]:
            names.pop(name, None)
            if new is not None:
                names[new] = file
        for name, file in names.items():
            (folder / name).write_bytes(self._survivor(self._files[file], rng, keep))

    @staticmethod
    def _survivor(file: _File, rng: random.Random, share: float | None) -> bytes:
        keep = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)) if share is None else share
        pieces: list[tuple[int, bytes | None]] = []
        for number, data in file.pending:
            if data is None:
                if rng.random() < max(keep, 0.5):
                    pieces.append((number, None))
                continue
            at = 0
            while at < len(data):
                end = min(len(data), at + SECTOR - (number + at) % SECTOR)
                if rng.random() < keep:
                    pieces.append((number + at, data[at:end]))
                at = end
        if rng.random() < 0.5:
            rng.shuffle(pieces)
        content = bytearray(file.durable)
        for number, piece in pieces:
            _apply(content, number, piece)
        return bytes(content)
