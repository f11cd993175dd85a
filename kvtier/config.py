"""Typed configuration: one set of names and defaults for Python, TOML, KVTIER_* variables, the CLI and the connectors.

    CacheConfig(host=HostConfig(size=parse_size("64GiB")))              # Python
    CacheConfig.load("kvtier.toml", **{"disk.path": "/mnt/nvme/kv"})   # file, then environment, then overrides
    KVTIER_HOST__SIZE=64GiB                                            # environment: sections end in two underscores

A wrong value is a ConfigError of one line per fault that names the key, the value and what would be accepted. Whether a
disk path can be used is said by the disk tier when it opens it, which is the only place that can know.
"""

import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

ENV_PREFIX = "KVTIER_"
ENV_FILE = "KVTIER_CONFIG"  # names the TOML file when `load` is given none
_OF_THE_TESTS = ("KVTIER_SEED", "KVTIER_TRACES", "KVTIER_TEST_")  # prefixes of variables that configure no cache

WritePolicy = Literal["never", "second_use", "ahead", "at_once"]

_UNITS = {"b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


class ConfigError(ValueError):
    """A configuration that cannot be used: a line for each fault."""


def parse_size(value: int | str) -> int:
    """Bytes from a number or from words such as "64GiB", "1.5 TB", "4096". Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value)) and (found[2].lower() or "b") in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2].lower() or "b"])
    else:
        raise ValueError('expected a size such as "64GiB", "500MB" or a number of bytes')
    if size < 1:
        raise ValueError('expected a size above zero, such as "64GiB"')
    return size


def format_size(size: int) -> str:
    """A size in words that `parse_size` takes back, exact where it is a whole number of a unit: "64GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if size >= scale and (size % scale == 0 or size >= 100 * scale):
            return f"{size // scale}{unit}" if size % scale == 0 else f"{size / scale:.1f}{unit}"
    return f"{size}B"


def readable_size(size: int) -> str:
    """A size for people, to three digits: "4.21 GiB", "512 KiB"; `parse_size` takes it back, about."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 100 * scale else f"{size / scale:.0f} {unit}"
    return f"{size} B"


Size = Annotated[int, BeforeValidator(parse_size)]


class _OneLineErrors(type(BaseModel)):  # type: ignore[misc]
    """Makes `Model(...)` raise ConfigError; overriding __init__ instead would lose the path of a nested fault."""

    def __call__(cls, **values: Any) -> Any:
        try:
            return super().__call__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(cls, error))) from None


if TYPE_CHECKING:
    _Base = BaseModel  # so that type checkers see the fields as arguments
else:

    class _Base(BaseModel, metaclass=_OneLineErrors):
        pass


class _Section(_Base):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """For `help()`: the fields' own words, with their defaults, below the class's."""
        fields = [_field_in_words(name, info) for name, info in cls.model_fields.items()]
        cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), *fields])


def _is_size(info: FieldInfo) -> bool:
    return any(isinstance(part, BeforeValidator) and part.func is parse_size for part in info.metadata)


def accepted(info: FieldInfo) -> str:
    """What a key takes, in words: "1 to 64", "auto, on, off", "a size"."""
    if _is_size(info):
        return "a size"
    if get_origin(info.annotation) is Literal:
        return ", ".join(map(str, get_args(info.annotation)))
    if info.annotation is bool:
        return "true, false"
    if Path in get_args(info.annotation):
        return "a path, none"
    limits = {name: getattr(part, name) for part in info.metadata for name in ("gt", "ge", "le") if hasattr(part, name)}
    words = {name: str(int(limit) if limit == int(limit) else limit) for name, limit in limits.items()}
    return f"{words['ge'] if 'ge' in words else 'above ' + words['gt']} to {words['le']}"


def _field_in_words(name: str, info: FieldInfo) -> str:
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
        return f"{name}\n    A section: help({info.annotation.__name__})."
    default = info.get_default(call_default_factory=True)
    shown = format_size(default) if _is_size(info) else repr(default)
    return f"{name} = {shown} ({accepted(info)})\n    {info.description}"


class HostConfig(_Section):
    """The host tier: pinned memory."""

    size: Size = 4 << 30
    """Bytes of pages in host memory, rounded down to whole pages; docs/sizing.md says what comes on top."""
    policy: Literal["lru"] = "lru"
    """Which page is evicted first."""
    write: WritePolicy = "at_once"
    """When a page of the device goes down to the host: never, on its second use, ahead of eviction, or at once."""


class DiskConfig(_Section):
    """The disk tier: one preallocated store in a directory of its own."""

    path: Path | None = None
    """An existing, writable directory on a real disk, ~ being the user's own; none: no disk tier."""
    size: Size = 16 << 30
    """Bytes of pages on disk; preallocated, rounded down to whole pages."""
    policy: Literal["lru"] = "lru"
    """Which page is evicted first."""
    write: WritePolicy = "at_once"
    """When a page of the host goes down to the disk."""
    io: Literal["auto", "io_uring", "threads"] = "auto"
    """How files are read and written; auto: io_uring where a real read and write through it work."""
    direct: Literal["auto", "on", "off"] = "auto"
    """Whether the page cache is bypassed (O_DIRECT); auto: where a real read and write with it work."""

    @field_validator("path", mode="before")
    @classmethod
    def _named(cls, path: object) -> object:
        return _path_or_none(path)

    @field_validator("path")
    @classmethod
    def _at_home(cls, path: Path | None) -> Path | None:
        try:
            return path.expanduser() if path is not None else None
        except RuntimeError as error:  # the home of nobody
            raise ValueError(f"{error}; expected a path without ~") from None


class WatermarksConfig(_Section):
    """When `write = "ahead"` copies down: from when few of a tier's slots can be had at once until enough can."""

    low: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of a tier's slots that are free or also held below, under which copying down starts."""
    high: float = Field(default=0.2, ge=0.0, le=1.0)
    """The share at which it stops; above low."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; expected 0 <= low < high <= 1")
        return self


class PrefetchConfig(_Section):
    """Bringing pages up ahead of the requests that were announced."""

    share: float = Field(default=0.25, ge=0.0, le=0.9)
    """Share of the host's slots, and of the device's, that may hold pages brought ahead and not used yet; 0: hints do
    nothing."""
    grace_seconds: float = Field(default=5.0, ge=0.0, le=3600.0)
    """How long after its expected start a request's pages are kept for it."""


class MoverConfig(_Section):
    """The data plane."""

    copy_threads: int = Field(default=1, ge=1, le=64)
    """Threads that gather and scatter pages between device and host."""
    bytes_in_flight: Size = 8 << 20
    """Bytes under way to and from the disk at a time; more only adds latency."""
    queue_pages: int = Field(default=65536, ge=1, le=1 << 24)
    """Pages that may wait in each lane; beyond that stores are dropped and loads recomputed."""
    verify: bool = True
    """Check every page that is read from disk before it is ready."""
    verify_host: bool = False
    """Check every page that is read from host memory too."""


CopyPath = Literal["auto", "pieces", "batch", "direct", "staged"]


class CudaConfig(_Section):
    """Copies between a GPU and host memory; without effect where the device tier is host memory."""

    offload: CopyPath = "auto"
    """How pages leave the GPU; auto: the fastest in the profile, else a default. docs/gpu.md says what each is."""
    onboard: CopyPath = "auto"
    """How pages come to the GPU."""
    profile: Path | None = None
    """A file of measured copies, which `kvtier calibrate-copies` writes; none: the defaults."""
    processor_share: float = Field(default=0.08, gt=0.0, le=1.0)
    """Share of the GPU's multiprocessors that a copy's kernel may use."""
    ends: Literal["auto", "poll", "call"] = "auto"
    """How the end of a copy is noticed: by looking at its event (poll), or by a call of the driver's thread; auto: the
    better in the profile, else poll."""


class CacheConfig(_Section):
    """Everything about a cache that is not the model's."""

    block_size: int = Field(default=16, ge=1, le=4096)
    """Tokens in a block."""
    host: HostConfig = Field(default_factory=HostConfig)
    disk: DiskConfig = Field(default_factory=DiskConfig)
    watermarks: WatermarksConfig = Field(default_factory=WatermarksConfig)
    prefetch: PrefetchConfig = Field(default_factory=PrefetchConfig)
    mover: MoverConfig = Field(default_factory=MoverConfig)
    cuda: CudaConfig = Field(default_factory=CudaConfig)
    load_policy: Literal["cost", "always", "never"] = "cost"
    """Whether what is found below the device is loaded: as far as that is predicted to be faster than computing it
    (what is not known yet is loaded, and learnt from), always, or never."""
    profile: Path | None = None
    """A file of `kvtier calibrate`, whose speeds the cost model begins with; none: it begins knowing nothing."""
    lease_seconds: float = Field(default=60.0, gt=0.0, le=86400.0)
    """How long a match holds its pages for a request that never comes back."""
    load_timeout_seconds: float = Field(default=10.0, gt=0.0, le=3600.0)
    """After how long a load that is not finished counts as failed, and its tokens are recomputed."""

    @field_validator("profile", mode="before")
    @classmethod
    def _named(cls, path: object) -> object:
        return _path_or_none(path)

    @classmethod
    def load_from(
        cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> Self:
        """`load` with an environment of the caller's choice."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        said: dict[str, str] = {}  # where, by key
        file = path if path is not None else environ.get(ENV_FILE) or None
        if file is not None:
            values |= _flatten(_read_toml(Path(file)))
            said |= dict.fromkeys(values, f"in {file}")
        for name, key in _variables(environ).items():
            values[key], said[key] = environ[name], f"in the variable {name}"
        given = _flatten(overrides)
        values |= given
        try:
            return cls(**_nest(values))
        except ConfigError as error:
            lines = [
                _with_source(line, {key: said[key] for key in said if key not in given})
                for line in str(error).split("\n")
            ]
            raise ConfigError("\n".join(lines)) from None

    @classmethod
    def load(cls, path: str | Path | None = None, **overrides: Any) -> Self:
        """Defaults, then the TOML file at `path` (or named by KVTIER_CONFIG), then KVTIER_* variables, then overrides.

        Overrides are sections (`host={"size": "1GiB"}`) or dotted keys (`**{"host.size": "1GiB"}`). Raises ConfigError.
        """
        return cls.load_from(path, None, **overrides)


def keys(section: type[BaseModel] = CacheConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key as `section.name`: its `description` is one line that says what it is, `accepted` what it takes."""
    found: dict[str, FieldInfo] = {}
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= keys(info.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = info
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"configuration file {str(path)!r}: {error.strerror}; expected a readable TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r}: not TOML: {error}") from None


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that set something, with the key that each one sets."""
    names = [each for each in sorted(environ) if each.startswith(ENV_PREFIX) and not each.startswith(_OF_THE_TESTS)]
    return {each: each.removeprefix(ENV_PREFIX).lower().replace("__", ".") for each in names if each != ENV_FILE}


def _with_source(line: str, said: Mapping[str, str]) -> str:
    key = line.partition(":")[0]
    return f"{line} ({said[key]})" if key in said else line


def _path_or_none(path: object) -> object:
    """TOML and variables have no word for None: "none" is one. An empty path is a forgotten variable."""
    if path == "":
        raise ValueError("expected a path, or none")
    return None if path == "none" else path


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, Mapping):
            flat[f"{prefix}{name}"] = value
    return flat


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"{section}: {inside!r}; expected a section, since {key} is given too")
        if isinstance(inside.get(name), dict):
            raise ConfigError(f"{key}: {value!r}; expected a section, since keys in it are given too")
        inside[name] = value
    return nested


def _explain(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    known = keys(model)
    for fault in error.errors(include_url=False):
        key, value, kind = ".".join(map(str, fault["loc"])), fault["input"], fault["type"]
        if kind == "extra_forbidden":
            yield f"{key}: unknown key (value {value!r}); {_nearest(key, known)}"
            continue
        context = fault.get("ctx", {})
        if kind == "value_error":
            wanted = str(context["error"])
        elif kind == "literal_error":
            wanted = f"expected {context['expected']}"
        elif kind == "model_type":
            inside = ", ".join(name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}."))
            wanted = f"expected a section with {inside}"
        else:
            wanted = re.sub(r"^Input (should be|is not)", "expected", fault["msg"]).partition(" for <class")[0]
        yield f"{key}: {value!r}: {wanted}" if key and not isinstance(value, dict) else f"{key}: {wanted}"


def _nearest(key: str, known: Collection[str]) -> str:
    sections = {name.rpartition(".")[0] for name in known} - {""}
    by_name = {name.rpartition(".")[2]: name for name in known} | {name: name for name in (*sections, *known)}
    for word in (key, key.rpartition(".")[2]):
        if near := difflib.get_close_matches(word, by_name, n=1):
            return f"did you mean {by_name[near[0]]}?"
    return f"known keys: {', '.join(known)}"
