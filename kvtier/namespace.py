"""Namespace: all that KV depends on beside the tokens, and the digests that are built on it.

A page is served only under the namespace it was computed for, so whatever can change a single byte of KV has to be in
here, resolved: a dtype of "auto" or a revision of "main" names different bytes on different days and is refused.

The fingerprint is SHA-256 over a versioned encoding in which every value carries its type and its length; no field can
imitate another, and None, "", 0, False and an empty list are five different things.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.arguments import instance
from kvtier.config import CacheConfig, ConfigError
from kvtier.content import Content, Media

if TYPE_CHECKING:
    from kvtier.geometry import KVGeometry

Value = None | bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"]

DIGEST_BYTES = 32
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int4", "uint4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
)
_DTYPE_ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_UNRESOLVED = ("", "auto", "default")
_MOVING_REVISIONS = ("main", "master", "head", "latest")


def _frame(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


def encode(value: Value) -> bytes:
    """The canonical bytes of a value: type tag, u64 length, content. Mappings are sorted by key; order of lists counts.

    Raises ValueError for a type that has no encoding, a key that is not a string, and NaN (it equals nothing).
    """
    if value is None:
        return _frame(b"n", b"")
    if isinstance(value, bool):  # before int: True is one
        return _frame(b"o", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _frame(b"i", str(int(value)).encode())
    if isinstance(value, float):
        if value != value:
            raise ValueError(f"a namespace cannot hold {value!r}, which equals nothing; give a finite number")
        return _frame(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return _frame(b"s", str(value).encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _frame(b"b", value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"a namespace's mappings have string keys, not {key!r}")
        return _frame(b"m", b"".join(encode(key) + encode(value[key]) for key in sorted(value)))
    if isinstance(value, Sequence):
        return _frame(b"l", b"".join(encode(item) for item in value))
    raise ValueError(
        f"a namespace cannot hold {type(value).__name__} {value!r}: give numbers, strings, bytes, lists, maps"
    )


def _freeze(value: Any) -> Any:
    """A deep copy, so that a caller's later change of its own dictionary changes nothing here."""
    if isinstance(value, Mapping):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(_freeze(item) for item in value)
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class Namespace:
    """All that KV depends on beside the tokens. Two are equal when their fingerprints are.

    Raises ValueError, naming field, value and what would be accepted, for anything left unresolved.
    """

    model: str  # the model's name; what it holds is said by `revision`
    revision: str  # commit hash or content digest (`model_revision`); never a branch
    dtype: str  # of the KV pages, resolved: "bfloat16", never "auto"
    rope: Mapping[str, Value]  # position settings: theta, scaling, lengths
    layout: str  # what the bytes of a page mean, in order: KVGeometry says it
    attention: str  # the kernel, and the instruction set or device that rounds its sums: "sdpa/avx512"
    block_size: int  # tokens in a block
    quantization: str | None = None  # of weights or KV, with its settings; None: none
    adapter: bytes | None = None  # 32-byte digest of the adapter's content (`adapter_digest`); None: no adapter
    salt: str | None = None  # the tenant; blocks are shared only under an equal salt
    extra: Mapping[str, Value] = field(default_factory=dict)  # whatever else an engine's KV depends on

    def __post_init__(self) -> None:
        for name in ("model", "revision", "layout", "attention"):
            self._check_text(name, getattr(self, name))
        if self.revision.lower() in _MOVING_REVISIONS:
            raise ValueError(f"namespace.revision: {self.revision!r} moves; expected a commit hash or a content digest")
        object.__setattr__(self, "dtype", self._resolved_dtype(self.dtype))
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"namespace.block_size: {self.block_size!r}; expected a positive number of tokens")
        if self.quantization is not None:
            self._check_text("quantization", self.quantization)
        if self.adapter is not None and not (isinstance(self.adapter, bytes) and len(self.adapter) == DIGEST_BYTES):
            raise ValueError(f"namespace.adapter: {self.adapter!r}; expected its 32-byte content digest, not a name")
        if self.salt is not None and not isinstance(self.salt, str):
            raise ValueError(f"namespace.salt: {self.salt!r}; expected a string or None")
        for name in ("rope", "extra"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"namespace.{name}: {getattr(self, name)!r}; expected a mapping")
            object.__setattr__(self, name, _freeze(getattr(self, name)))
        _ = self.fingerprint  # a value without an encoding is refused here, not at first use

    @staticmethod
    def _check_text(name: str, value: object) -> None:
        if not isinstance(value, str) or value.strip().lower() in _UNRESOLVED:
            raise ValueError(f"namespace.{name}: {value!r} is not resolved; expected the name of what is really used")

    @staticmethod
    def _resolved_dtype(value: object) -> str:
        name = str(value).removeprefix("torch.")
        name = _DTYPE_ALIASES.get(name, name)
        if name not in DTYPES:
            raise ValueError(f"namespace.dtype: {value!r}; expected the resolved dtype, one of {', '.join(DTYPES)}")
        return name

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that name this namespace in every process and on every day."""
        parts = [encode("kvtier.namespace.v1")]
        parts += [encode(item.name) + self._encoded(item.name) for item in fields(self)]
        return hashlib.sha256(b"".join(parts)).digest()

    def _encoded(self, name: str) -> bytes:
        try:
            return encode(getattr(self, name))
        except ValueError as error:
            raise ValueError(f"namespace.{name}: {error}") from None

    def with_(self, **changes: Any) -> Namespace:
        """The same namespace with some fields changed: `with_(salt="tenant-7", adapter=digest)`."""
        return replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def root_digest(space: bytes, group: int = 0) -> bytes:
    """The digest that every chain of a namespace (its 32-byte fingerprint) and group starts from."""
    if len(space) != DIGEST_BYTES:
        raise ValueError(f"space: {len(space)} bytes; expected a namespace's fingerprint of {DIGEST_BYTES}")
    if not 0 <= group < 1 << 32:
        raise ValueError(f"group: {group}; expected a number from 0 to 2**32 - 1")
    return hashlib.sha256(b"kvtier.root.v1" + space + struct.pack("<I", group)).digest()


def _labels(labels: npt.ArrayLike, block_size: int, media: Iterable[Media]) -> Iterator[bytes]:
    array = np.asarray(labels)
    if array.dtype == np.uint8 and array.ndim == 2:  # an engine's own 32-byte block hashes, which say it all
        if array.shape[1] != DIGEST_BYTES:
            raise ValueError(f"labels: hashes of {array.shape[1]} bytes; expected {DIGEST_BYTES}")
        yield from (row.tobytes() for row in array)
        return
    if block_size < 1:
        raise ValueError(f"block_size: {block_size}; expected a positive number of tokens")
    yield from (row.tobytes() for row in Content(array, media).whole(block_size))


def chain_digests(
    space: bytes, group: int, labels: npt.ArrayLike, block_size: int, media: Iterable[Media] = ()
) -> list[bytes]:
    """The digest of every full block of a chain, in order: what the remote tier and other processes know it by.

    `labels`: token ids [n] (a partial last block has no digest) with the `media` among them, or an engine's 32-byte
    block hashes, uint8 [n, 32]. Each digest is SHA-256 over the digest before it and the block's label, as
    `kvtier.content` defines it; the catalog computes the same in C++.
    """
    digest = root_digest(space, group)
    digests = []
    for label in _labels(labels, block_size, media):
        digest = hashlib.sha256(digest + label).digest()
        digests.append(digest)
    return digests


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _folder_digest(kind: str, folder: Path, patterns: Sequence[str], weights: Sequence[str]) -> bytes:
    if not folder.is_dir():
        raise ValueError(f"{kind}: {str(folder)!r} is not a folder")
    files = sorted({path for pattern in (*patterns, *weights) for path in folder.rglob(pattern) if path.is_file()})
    if not any(path.match(pattern) for path in files for pattern in weights):
        raise ValueError(f"{kind}: {str(folder)!r} holds no weights; expected {', '.join(weights)}")
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing gives the GIL up
        digests = list(pool.map(_file_digest, files))
    content = {path.relative_to(folder).as_posix(): digest for path, digest in zip(files, digests, strict=True)}
    return hashlib.sha256(encode(f"kvtier.{kind}.v1") + encode(content)).digest()


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def model_revision(folder: str | Path) -> str:
    """A revision for a model in a local folder: "sha256:<hex>" over the content of its configuration, code and weights.

    Reads every byte (some seconds per 10 GB): a fine-tune has the same file names, headers and sizes as its base, so
    nothing less names the weights. For a hub snapshot its commit hash is as good and free.
    """
    return "sha256:" + _folder_digest("model", Path(folder), ("config.json", "*.py"), _WEIGHTS).hex()


def adapter_digest(source: str | Path | Mapping[str, Any]) -> bytes:
    """The 32-byte content digest of an adapter: a folder (its configuration and weights), or tensors by name.

    What the adapter or its folder is called does not count. Tensors are NumPy arrays or torch tensors; name, dtype,
    shape and bytes of each count, and a LoRA's scaling has to be among them (as a 0-d array) or in the folder.
    """
    if not isinstance(source, Mapping):
        return _folder_digest("adapter", Path(source), ("adapter_config.json",), _WEIGHTS)
    if not source:
        raise ValueError("adapter: no tensors; expected at least one")
    content: dict[str, Value] = {}
    for name, tensor in source.items():
        shape, dtype = tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch.")
        content[name] = (dtype, shape, hashlib.sha256(_tensor_bytes(tensor)).digest())
    return hashlib.sha256(encode("kvtier.adapter.tensors.v1") + encode(content)).digest()


def _tensor_bytes(tensor: Any) -> bytes:
    if hasattr(tensor, "detach"):  # torch, which NumPy cannot read in bfloat16; never imported from here
        import sys

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return bytes(flat.view(sys.modules["torch"].uint8).numpy())
    return np.ascontiguousarray(tensor).tobytes()


def check_agreement(config: CacheConfig, geometry: KVGeometry, namespace: Namespace) -> None:
    """What is said in several places must be said equally: a page under a wrong name is a wrong answer."""
    instance("config", config, CacheConfig)
    instance("namespace", namespace, Namespace)
    sizes = {config.block_size, geometry.block_size, namespace.block_size}
    if len(sizes) > 1:
        raise ConfigError(
            f"block_size: {config.block_size} in the configuration, {geometry.block_size} in the geometry, "
            f"{namespace.block_size} in the namespace; they must agree"
        )
    if geometry.dtype != namespace.dtype:
        raise ConfigError(
            f"dtype: {geometry.dtype} in the geometry, {namespace.dtype} in the namespace; they must agree"
        )
    if geometry.layout_tag != namespace.layout:
        raise ConfigError(
            f"layout: {geometry.layout_tag!r} in the geometry, {namespace.layout!r} in the namespace; they must agree"
        )
