"""An engine's KV arrays as segments: where each slot's bytes lie, checked against the layout that was named.

Arrays may be anything in host memory that speaks `__array_interface__` (NumPy) or DLPack (torch and others), and
anything on a CUDA device that speaks DLPack or `__cuda_array_interface__` (torch, CuPy and others); all of them on one
device. Their element values are never looked at.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from kvtier import _core
from kvtier.geometry.layout import Layout

# A copy in shorter runs is slower than computing the block again; nobody lays KV out like that on purpose.
SHORTEST_RUN = 512

_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_DLPACK_TYPES = {  # (code, bits) of dlpack.h
    (0, 8): "int8",
    (1, 8): "uint8",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
}
_NUMPY_TYPES = {"f2": "float16", "f4": "float32", "f8": "float64", "i1": "int8", "u1": "uint8"}
_RAW_KINDS = "Vuib"  # NumPy kinds that hold opaque bits: bfloat16 travels as uint16 or void there


class Segment(NamedTuple):
    """A contiguous piece of every page, in bytes: slot s has it at base + s * stride."""

    base: int
    stride: int
    length: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """What `adopt` found: the segments of a page in page order, and how many slots the arrays hold.

    `device`: the number of the CUDA device that they are on; None: host memory.
    """

    segments: tuple[Segment, ...]
    slots: int
    device: int | None = None

    def shares_memory(self, other: "Adopted") -> bool:
        """Whether some byte is in a slot of both; True also where runs of unlike strides interleave, as none do."""
        if self.device != other.device:
            return False
        return any(not _apart(x, self.slots, y, other.slots) for x in self.segments for y in other.segments)


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str | None  # None: raw bits
    item_bytes: int
    device: int | None  # number of the CUDA device; None: host memory

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.name} of shape {list(self.shape)}: {why}")


def adopt(
    tensors: Mapping[str, Any] | Sequence[Any],
    *,
    layout: Layout,
    layers: int,
    shape: tuple[int, ...],
    dtype: str,
    item_bytes: int,
) -> Adopted:
    """Check the arrays against layout, sizes and dtype, and derive their segments.

    `tensors` are in layer order; where K and V are apart, flat (k0, v0, k1, ...) or in pairs. A mapping's keys name its
    arrays in messages. `shape` is an array's with 0 in the place of the number of blocks.

    Raises ValueError naming the array, its shape and what would be accepted.
    """
    named = list(_flatten(tensors))
    wanted = layers * layout.per_layer
    if len(named) != wanted:
        raise ValueError(
            f"tensors: got {len(named)} arrays; expected {wanted} for {layers} layers of {layout.tag} ({layout.about})"
        )
    arrays = [_read(name, tensor) for name, tensor in named]
    for array in arrays:
        _check_type(array, dtype, item_bytes)
        _check_shape(array, layout, shape, arrays[0])
        _check_order(array, layout)
        if array.device != arrays[0].device:
            array.refuse(f"is {_where(array.device)}; expected {_where(arrays[0].device)}, as {arrays[0].name} is")
    slots = arrays[0].shape[layout.axes.index("b")]
    pieces = [_pieces(array, layout) for array in arrays]
    _check_apart([(a.name, s) for a, own in zip(arrays, pieces, strict=True) for s in own], slots)
    segments = _merge([segment for own in pieces for segment in own], slots)
    if layout.layers_inside and len(segments) != 1:
        arrays[0].refuse(
            f"expected for {layout.tag} all {layers} layers of a block side by side in one buffer, in the order given"
        )
    return Adopted(segments, slots, arrays[0].device)


def _where(device: int | None) -> str:
    return "in host memory" if device is None else f"on CUDA device {device}"


def _flatten(tensors: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    items = (
        [(f"tensors[{key!r}]", value) for key, value in tensors.items()]
        if isinstance(tensors, Mapping)
        else [(f"tensors[{index}]", value) for index, value in enumerate(tensors)]
    )
    for name, value in items:
        if isinstance(value, (tuple, list)):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
        else:
            yield name, value


def _read(name: str, tensor: Any) -> _Array:
    shape = list(getattr(tensor, "shape", ()))
    device: int | None = None
    if hasattr(tensor, "__dlpack_device__"):
        try:
            kind, number = (int(part) for part in tensor.__dlpack_device__())
        except (ValueError, TypeError, BufferError, RuntimeError) as error:  # e.g. torch's meta tensors
            raise ValueError(
                f"{name} of shape {shape}: {error}; expected an array in host memory or on a CUDA device"
            ) from None
        if kind not in (_DLPACK_CPU, _DLPACK_CUDA):
            raise ValueError(
                f"{name} of shape {shape}: is on DLPack device type {kind}; "
                "expected an array in host memory or on a CUDA device"
            )
        device = number if kind == _DLPACK_CUDA else None
    elif hasattr(tensor, "__cuda_array_interface__"):
        return _from_interface(name, tensor, tensor.__cuda_array_interface__, _ordinal(tensor))
    if device is None and hasattr(tensor, "__array_interface__"):
        return _from_interface(name, tensor, tensor.__array_interface__, None)
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(name, tensor, shape, device)
    raise ValueError(
        f"{name}: {type(tensor).__name__} is not an array; "
        "expected NumPy's __array_interface__, DLPack's __dlpack__ or __cuda_array_interface__"
    )


def _ordinal(tensor: Any) -> int:
    """Which CUDA device an array says it is on, as CuPy's and torch's do; else 0: the driver knows if that is wrong."""
    device = getattr(tensor, "device", None)
    found = next((getattr(device, word) for word in ("id", "index") if hasattr(device, word)), 0)
    return found if isinstance(found, int) else 0


def _from_interface(name: str, tensor: Any, interface: Mapping[str, Any], device: int | None) -> _Array:
    """From `__array_interface__` or `__cuda_array_interface__`, which are alike."""
    for word in ("shape", "data", "typestr"):
        if word not in interface:
            raise ValueError(f"{name}: its array interface has no {word!r}; expected shape, data and typestr")
    shape = tuple(int(size) for size in interface["shape"])
    base, read_only = interface["data"]
    typestr = interface["typestr"]
    item_bytes = int(typestr[2:])
    strides = interface.get("strides")
    if strides is None:  # C order
        strides = tuple(itertools.accumulate(reversed((*shape[1:], item_bytes)), lambda x, y: x * y))[::-1]
    dtype = _NUMPY_TYPES.get(typestr[1:])
    own_name = getattr(getattr(tensor, "dtype", None), "name", "")  # ml_dtypes' types call themselves void in typestr
    if typestr[1] == "V" and own_name in _DLPACK_TYPES.values():
        dtype = own_name
    elif dtype is None and typestr[1] not in _RAW_KINDS:
        dtype = typestr
    array = _Array(name, int(base), shape, tuple(int(s) for s in strides), dtype, item_bytes, device)
    if read_only:
        array.refuse("is read-only; expected an array that pages can be written into")
    if typestr[0] == ">":
        array.refuse(f"has big-endian elements ({typestr}); expected the machine's own order")
    return array


def _from_dlpack(name: str, tensor: Any, shape: list[int], device: int | None) -> _Array:
    try:
        base, sizes, strides, code, bits, lanes = _core.dlpack_layout(tensor)
    except (TypeError, BufferError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} of shape {shape}: cannot be shared as a writable array ({reason})") from None
    dtype = _DLPACK_TYPES.get((code, bits)) or (None if code in (0, 1) else f"DLPack type {code} of {bits} bits")
    item_bytes = bits * lanes // 8
    return _Array(name, base, tuple(sizes), tuple(s * item_bytes for s in strides), dtype, item_bytes, device)


def _check_type(array: _Array, dtype: str, item_bytes: int) -> None:
    raw = array.dtype is None or (array.dtype in ("int8", "uint8") and item_bytes == 1)
    if array.item_bytes != item_bytes or not (raw or array.dtype == dtype):
        found = array.dtype or f"raw elements of {array.item_bytes} bytes"
        array.refuse(f"holds {found}; expected {dtype}, or unsigned integers of {item_bytes} bytes as its raw bits")


def _check_shape(array: _Array, layout: Layout, shape: tuple[int, ...], first: _Array) -> None:
    block = layout.axes.index("b")
    words = (
        "[" + ", ".join("blocks" if axis == "b" else str(n) for axis, n in zip(layout.axes, shape, strict=True)) + "]"
    )
    if len(array.shape) != len(shape) or any(
        got != want for axis, got, want in zip(layout.axes, array.shape, shape, strict=True) if axis != "b"
    ):
        array.refuse(f"expected {words} for layout {layout.tag} (axes {', '.join(layout.axes)})")
    if array.shape[block] < 1:
        array.refuse("holds no block; expected at least one")
    if array.shape[block] != first.shape[block]:
        array.refuse(f"expected {first.shape[block]} blocks, as {first.name} has")


def _check_order(array: _Array, layout: Layout) -> None:
    strides = {axis: s for axis, n, s in zip(layout.axes, array.shape, array.strides, strict=True) if n > 1}
    if any(stride <= 0 for stride in strides.values()):
        array.refuse(f"has strides {list(array.strides)} bytes; expected none to be zero or negative")
    in_memory = "".join(sorted(strides, key=lambda axis: -strides[axis]))
    wanted = "".join(axis for axis in layout.order if axis in strides)
    if in_memory != wanted:
        array.refuse(
            f"lies in memory as {in_memory}, slowest axis first (strides {list(array.strides)} bytes); "
            f"expected {wanted} for layout {layout.tag}"
        )
    block_bytes = (
        math.prod(n for axis, n in zip(layout.axes, array.shape, strict=True) if axis != "b") * array.item_bytes
    )
    if layout.order.startswith("lb") and strides.get("b", block_bytes) != block_bytes:
        array.refuse(f"has its blocks {strides['b']} bytes apart; expected {block_bytes} for layout {layout.tag}")


def _pieces(array: _Array, layout: Layout) -> list[Segment]:
    """The contiguous runs of one block, in memory order: inner axes merge while each one's stride is the run so far."""
    sizes = dict(zip(layout.axes, array.shape, strict=True))
    strides = dict(zip(layout.axes, array.strides, strict=True))
    inner = [axis for axis in layout.order if axis in sizes and axis != "b" and sizes[axis] > 1]
    run = array.item_bytes
    while inner and strides[inner[-1]] == run:
        run *= sizes[inner.pop()]
    if inner and strides[inner[-1]] < run:
        array.refuse(f"has strides {list(array.strides)} bytes that make elements overlap")
    outside = layout.order[: layout.order.index("b")]  # K and V of [2, B, ...] are apart by intent
    if run < SHORTEST_RUN and any(axis not in outside for axis in inner):
        array.refuse(
            f"has a block in contiguous runs of only {run} bytes (strides {list(array.strides)}); expected at least "
            f"{SHORTEST_RUN}: make the array contiguous within a block"
        )
    stride = strides["b"] if sizes["b"] > 1 else run
    offsets = itertools.product(*(range(0, sizes[axis] * strides[axis], strides[axis]) for axis in inner))
    return [Segment(array.base + sum(parts), stride, run) for parts in offsets]


def _check_apart(pieces: list[tuple[str, Segment]], slots: int) -> None:
    """No two runs share a byte in any two slots. As csrc/copy/segments.cpp, but here the arrays have names."""
    pieces = sorted(pieces, key=lambda piece: piece[1].base)
    for index, (name, x) in enumerate(pieces):
        if slots > 1 and x.stride < x.length:
            raise ValueError(f"{name}: blocks are {x.stride} bytes apart and {x.length} long, so they share memory")
        end = _end(x, slots)
        for other, y in pieces[index + 1 :]:
            if y.base >= end:
                break
            if not _apart(x, slots, y, slots):
                both = f"{name} and {other} share memory" if other != name else f"{name} shares memory with itself"
                raise ValueError(f"{both}; expected every block to have bytes of its own")


def _apart(x: Segment, x_slots: int, y: Segment, y_slots: int) -> bool:
    """Whether they lie side by side, or take turns in every stride."""
    if y.base >= _end(x, x_slots) or x.base >= _end(y, y_slots):
        return True
    turns = x_slots > 1 and y_slots > 1 and x.stride == y.stride
    return turns and x.length <= (y.base - x.base) % x.stride <= x.stride - y.length


def _end(segment: Segment, slots: int) -> int:
    return segment.base + (slots - 1) * segment.stride + segment.length


def _merge(pieces: list[Segment], slots: int) -> tuple[Segment, ...]:
    """Neighbours in page order that are neighbours in memory, in every slot, become one."""
    merged: list[Segment] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        together = last.length + piece.length if last is not None else 0
        if (
            last is not None
            and last.base + last.length == piece.base
            and (slots == 1 or (last.stride == piece.stride and together <= last.stride))
        ):
            merged[-1] = Segment(last.base, last.stride if slots > 1 else together, together)
        else:
            merged.append(piece)
    return tuple(merged)
