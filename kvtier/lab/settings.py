"""What a benchmark was asked to do, checked: every wrong value is one line that names it, before anything is built."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier import _core
from kvtier.budget import allowance
from kvtier.config import CacheConfig, format_size, parse_size
from kvtier.content import label_bytes
from kvtier.lab.machine import filesystem
from kvtier.lab.results import SOURCES, Source

__all__ = [
    "BenchError", "Conversation", "Fitted", "Settings", "Shape", "parse_bytes", "parse_counts", "parse_ratios",
    "parse_tiers", "settings_of",
]  # fmt: skip

JOURNAL_ENTRIES = 4096  # as the disk store makes them
_COUNT = re.compile(r"\s*(\d+)\s*([kK]?)\s*", re.ASCII)


class BenchError(ValueError):
    """A benchmark that cannot be run as asked, or a run that could not prove what it claims: one line."""


def parse_counts(field_name: str, text: str) -> tuple[int, ...]:
    """ "2k,8k,512" → (2048, 8192, 512); each above zero, none twice."""
    found = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None or int(match[1]) < 1:
            raise BenchError(f"{field_name}: {word.strip()!r} in {text!r}; expected numbers above zero such as 2k,8k")
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(dict.fromkeys(found))


def parse_ratios(field_name: str, text: str) -> tuple[float, ...]:
    """ "0.5,3,10" → (0.5, 3.0, 10.0)."""
    found = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = 0.0
        if not 0.01 <= value <= 1000:
            raise BenchError(f"{field_name}: {word.strip()!r} in {text!r}; expected numbers from 0.01 to 1000")
        found.append(value)
    return tuple(dict.fromkeys(found))


def parse_tiers(text: str) -> tuple[Source, ...]:
    """ "host,disk" → ("host", "disk"), in the order of the tables."""
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word == "remote":
            raise BenchError(
                "tiers: 'remote': there is no remote tier yet; expected some of recompute,device,host,disk"
            )
        if word not in SOURCES:
            near = difflib.get_close_matches(word, SOURCES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected some of {','.join(SOURCES)}"
            raise BenchError(f"tiers: {word!r} is no tier; {hint}")
    return tuple(source for source in SOURCES if source in words)


def parse_bytes(field_name: str, text: str) -> int:
    """A size in words; BenchError names the field."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise BenchError(f"{field_name}: {text!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Shape:
    """What sizes are reckoned with: of a model or of a geometry alone."""

    name: str
    block_size: int
    device_bytes: int
    """Of one block on the device."""
    page_bytes: int
    """Of one block in host memory and on disk, padding included."""
    context_limit: int | None
    """Tokens, prompt and output together, that the model's positions allow."""

    def disk_bytes(self, blocks: int) -> int:
        """What a store of so many blocks takes, its records and journal included."""
        return int(self._footprint().bytes(blocks))

    def disk_blocks(self, size: int) -> int:
        """How many blocks a store of ``size`` bytes holds."""
        return int(self._footprint().slots_in(size))

    def _footprint(self) -> _core.DiskFootprint:
        return _core.DiskFootprint(self.device_bytes, label_bytes(self.block_size), JOURNAL_ENTRIES)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat of the load table: the first message, then ``rounds - 1`` shorter ones; each is answered."""

    first_tokens: int
    turn_tokens: int
    output_tokens: int
    rounds: int

    @property
    def tokens(self) -> int:
        """At its end."""
        turns = self.rounds - 1
        return self.first_tokens + turns * self.turn_tokens + self.rounds * self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's options; construct, then :meth:`fitted` to a model."""

    model: str | None = None
    geometry: str | None = None
    contexts: tuple[int, ...] | None = None
    """None: those of ``usual_contexts`` that fit."""
    usual_contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 32768, 131072)
    tiers: tuple[Source, ...] = SOURCES
    output_tokens: int = 16
    repeat: int = 10
    users: tuple[int, ...] = (1, 4, 16, 64)
    """Empty: no load table."""
    working_sets: tuple[float, ...] = (0.5, 3.0, 10.0)
    conversation: Conversation = Conversation(256, 48, 16, 3)
    pool_conversations: int = 16
    """Conversations that the load table's device pool holds, where ``device_size`` does not say otherwise."""
    most_users: int = 64
    """Where the search for the most concurrent requests ends."""
    out: Path = Path("out")
    disk_path: Path | None = None
    """Where a temporary store is made; None: beside ``out``."""
    device: str = "cpu"
    """Where the model runs and its KV lies, in torch's words: cpu, cuda, cuda:1."""
    device_size: int | None = None
    host_size: int | None = None
    disk_size: int | None = None
    flops: float | None = None
    """Operations per second for the modelled recompute; None: measured on this machine."""
    seconds: float | None = None
    """Time that may pass; repeats, then points of the load table, are left out to keep to it."""
    seed: int = 0
    chunk_tokens: int = 64
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        if self.model is not None and self.geometry is not None:
            raise BenchError(f"geometry: {self.geometry!r} beside model {self.model!r}; expected one of the two")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise BenchError(f"device: {self.device!r}; expected cpu, cuda or cuda:N")
        if self.device != "cpu" and self.geometry is not None:
            raise BenchError(
                f"device: {self.device!r} beside geometry {self.geometry!r}, whose pages are in host memory"
            )
        for name, most in (("output_tokens", 1 << 16), ("repeat", 100_000), ("most_users", 4096)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise BenchError(f"{name.replace('_', '-')}: {value}; expected 1 to {most}")
        if any(count > 4096 for count in self.users):
            raise BenchError(f"users: {max(self.users)}; expected at most 4096")
        if self.flops is not None and not self.flops > 0:
            raise BenchError(f"flops: {self.flops:g}; expected operations per second, above zero, such as 4e14")
        self._check_out()

    def _check_out(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise BenchError(f"out: {str(self.out)!r} is a file; expected a folder, which is made if need be")
        nearest = self.store_parent if self.disk_path is None else _existing(self.out)
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise BenchError(
                f"out: {str(self.out)!r} cannot be written ({str(nearest)!r} is read-only); choose another"
            )

    @property
    def uses_disk(self) -> bool:
        return "disk" in self.tiers

    @property
    def store_parent(self) -> Path:
        """The existing directory in which the temporary store is made."""
        return self.disk_path if self.disk_path is not None else _existing(self.out)

    def check_disk(self, needed: int) -> None:
        """Refuse a directory in which a store of ``needed`` bytes cannot be."""
        path = self.store_parent
        name = "disk-path" if self.disk_path is not None else "out (disk-path is not given)"
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise BenchError(f"{name}: {str(path)!r} {what}; expected an existing directory on a disk")
        found = filesystem(path)
        if found.in_memory:
            raise BenchError(f"{name}: {str(path)!r} is {found.kind}, which is memory; expected a directory on a disk")
        if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            raise BenchError(f"{name}: {str(path)!r} is read-only; expected a directory that can be written")
        if needed > found.free:
            raise BenchError(
                f"{name}: {str(path)!r} has {format_size(found.free)} free; the run needs {format_size(needed)}: "
                "shorter contexts, or a smaller disk-size"
            )

    def fitted(self, shape: Shape) -> Fitted:
        """Sizes for ``shape``. BenchError: a context that cannot be had, or a tier that could not serve it."""
        asked = self.contexts or self.usual_contexts
        contexts = []
        for context in asked:
            why = self._refusal(context, shape)
            if why is None:
                contexts.append(context)
            elif self.contexts is not None:
                raise BenchError(why)
        if not contexts:
            raise BenchError(self._refusal(asked[0], shape) or "contexts: none")
        fitted = self._sized(tuple(sorted(contexts)), shape)
        while self.contexts is None and len(fitted.contexts) > 1 and fitted.memory_bytes > _share_of_memory():
            fitted = self._sized(fitted.contexts[:-1], shape)
        fitted.check()
        return fitted

    def _refusal(self, context: int, shape: Shape) -> str | None:
        block = shape.block_size
        if context < block:
            return f"contexts: {context} tokens are less than a block of {block}; no tier could serve any of it"
        if context % block:
            near = context // block * block
            return (
                f"contexts: {context} is not whole blocks of {block} tokens; expected such as {near} or {near + block}"
            )
        total = self.sequence_tokens(context, block)
        if shape.context_limit is not None and total > shape.context_limit:
            most = (shape.context_limit - self.output_tokens - block) // block * block
            return (
                f"contexts: {context}, a block of {block} to compute and {self.output_tokens} of output make {total} "
                f"tokens; {shape.name} allows {shape.context_limit}: expected at most {most}"
            )
        return None

    def sequence_tokens(self, context: int, block: int) -> int:
        """Tokens of a whole request: prefix, one block that is always computed, output."""
        return context + block + (0 if self.geometry else self.output_tokens)

    def _sized(self, contexts: tuple[int, ...], shape: Shape) -> Fitted:
        blocks = -(-self.sequence_tokens(contexts[-1], shape.block_size) // shape.block_size)
        # One sequence, and a little over: what was cached before makes room.
        roomy = blocks + max(8, blocks // 16)
        device = self.device_size // shape.device_bytes if self.device_size else roomy
        host = self.host_size or roomy * shape.page_bytes
        disk = self.disk_size or shape.disk_bytes(roomy)
        return Fitted(self, shape, contexts, blocks, device, host, disk if self.uses_disk else 0)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Settings with the sizes that they mean for a shape; ``blocks`` are those of the longest sequence."""

    settings: Settings
    shape: Shape
    contexts: tuple[int, ...]
    blocks: int
    device_blocks: int
    host_bytes: int
    disk_bytes: int

    @property
    def memory_bytes(self) -> int:
        return self.device_blocks * self.shape.device_bytes + self.host_bytes

    @property
    def load_device_blocks(self) -> int:
        """The load table's device pool: `device_size` if given, else some conversations."""
        if self.settings.device_size:
            return self.device_blocks
        return self.settings.pool_conversations * -(-self.settings.conversation.tokens // self.shape.block_size)

    @property
    def load_host_blocks(self) -> int:
        """The load table's host tier: `host_size` if given, else four device pools."""
        given = self.settings.host_size
        return given // self.shape.page_bytes if given else 4 * self.load_device_blocks

    @property
    def load_disk_blocks(self) -> int:
        """The load table's disk tier: `disk_size` if given, else room for the largest working set."""
        if not self.settings.uses_disk:
            return 0
        if self.settings.disk_size:
            return self.shape.disk_blocks(self.settings.disk_size)
        return int(1.2 * max(self.settings.working_sets) * self.load_device_blocks) + 1

    @property
    def _load_disk_bytes(self) -> int:
        return self.shape.disk_bytes(self.load_disk_blocks) if self.load_disk_blocks else 0

    @property
    def load_blocks_below(self) -> int:
        """Blocks that the load table's tiers can hold together; a lower tier has what a higher one has."""
        return max(self.load_device_blocks, self.load_host_blocks, self.load_disk_blocks)

    def check(self) -> None:
        """Refuse tiers that could not hold the longest sequence, and sizes that the machine does not have."""
        shape, longest = self.shape, self.contexts[-1]
        tokens = self.blocks * shape.block_size
        if self.device_blocks < self.blocks:
            given = format_size(self.settings.device_size or self.device_blocks * shape.device_bytes)
            raise BenchError(
                f"device-size: {given} holds {self.device_blocks * shape.block_size} tokens, less than one sequence of "
                f"{tokens}; expected at least {self.blocks * shape.device_bytes} bytes"
            )
        blocks = longest // shape.block_size
        for name, size, held, needed, why in (
            (
                "host-size",
                self.host_bytes,
                self.host_bytes // shape.page_bytes,
                blocks * shape.page_bytes,
                ("host", "disk"),
            ),
            ("disk-size", self.disk_bytes, shape.disk_blocks(self.disk_bytes), shape.disk_bytes(blocks), ("disk",)),
        ):
            served = [tier for tier in why if tier in self.settings.tiers]
            if served and held < blocks:
                raise BenchError(
                    f"{name}: {format_size(size)} cannot hold a prefix of {longest} tokens, which {served[0]} is to "
                    f"serve; expected at least {needed} bytes"
                )
        self._check_machine()

    def _check_machine(self) -> None:
        needs = [(self.memory_bytes, self.disk_bytes, "contexts", f"{self.contexts[-1]} tokens need")]
        if self.settings.users and not self.settings.geometry:
            page = self.shape.page_bytes
            memory = self.load_device_blocks * self.shape.device_bytes + self.load_host_blocks * page
            needs.append((memory, self._load_disk_bytes, "users", "the load table needs"))
            room, chat = self.load_device_blocks * self.shape.block_size, self.settings.conversation.tokens
            if chat > room:
                raise BenchError(
                    f"device-size: it holds {room} tokens, less than one conversation of {chat}; expected more, or "
                    "--users none"
                )
        left = allowance()
        for memory, disk, name, what in needs:
            if memory > left.bytes:
                raise BenchError(
                    f"{name}: {what} {format_size(memory)} of memory for device and host tier; "
                    f"{format_size(left.bytes)} are left of {left.limited_by}: expected less of them, or smaller sizes"
                )
            if self.settings.uses_disk:
                self.settings.check_disk(disk)

    def cache_config(self) -> CacheConfig:
        """The cache's configuration for table 1, but for the disk tier's directory."""
        # A load must not be given up for being slow: how slow it is, is what is measured.
        slow = {"load_timeout_seconds": 600.0, "lease_seconds": 600.0}
        return self._config(self.host_bytes, self.disk_bytes, "at_once").model_copy(update=slow)

    def load_config(self, *, offload: bool) -> CacheConfig:
        """The same for table 2; "off" leaves the host tier one page, to which nothing is written."""
        page = self.shape.page_bytes
        if not offload:
            return self._config(page, page, "never")
        return self._config(self.load_host_blocks * page, self._load_disk_bytes, "at_once")

    def _config(self, host: int, disk: int, write: str) -> CacheConfig:
        base = self.settings.cache
        changes = {
            "load_policy": "always",  # what a load takes is what is measured, also where computing were faster
            "host": base.host.model_copy(update={"size": host, "write": write}),
            "disk": base.disk.model_copy(update={"size": disk or base.disk.size, "write": write, "path": None}),
        }
        return base.model_copy(update=changes)


def _share_of_memory() -> float:
    """What a run that chose its own contexts may take: not all of what others may need."""
    return allowance().bytes * 0.6


def _existing(path: Path) -> Path:
    """The nearest directory on the way to ``path`` that exists."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


# What `--quick` means: under five minutes on two cores, also where they are half as fast as when nothing else runs. A
# working set ten times the pool is what shows most, so the pool is small: it is the conversations that take the time.
_QUICK: Mapping[str, Any] = {
    "usual_contexts": (512, 1024, 2048),
    "output_tokens": 4,
    "repeat": 5,
    "users": (1,),
    "working_sets": (0.5, 3.0, 10.0),
    "conversation": Conversation(96, 16, 2, 2),
    "pool_conversations": 2,
    "most_users": 8,
    "seconds": 280.0,
}


def settings_of(*, quick: bool = False, **given: Any) -> Settings:
    """Settings from what was given; what is None takes the default, which ``quick`` makes small."""
    values = dict(_QUICK) if quick else {}
    values |= {name: value for name, value in given.items() if value is not None}
    return Settings(**values)
