"""KVGeometry: the shape of one page."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvtier.geometry import arrays, models
from kvtier.geometry.layout import DEFAULT_LATENT_LAYOUT, DEFAULT_LAYOUT, LAYOUTS, Layout
from kvtier.namespace import encode

_NUMPY_DTYPES = {name: name for name in ("float64", "float32", "float16", "int8", "uint8")}  # others: raw bits
PAGE_ALIGNMENT = 4096  # pages are padded to it, for direct I/O


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """What one page is made of, on one rank: `block_size` tokens' KV of all `layers`.

    Raises ValueError, naming field, value and what would be accepted, for a shape that cannot be.
    """

    layers: int
    kv_heads: int  # per rank; 1 for MLA
    head_dim: int  # elements of one head's K; for MLA those of the latent: kv_lora_rank + qk_rope_head_dim
    dtype: str  # resolved: "bfloat16", never "auto"
    block_size: int  # tokens
    latent: bool = False  # MLA: one latent per token in place of K and V
    layout: str = ""  # a tag of LAYOUTS; "": the lab's own, or MLA's only one

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"geometry.{name}: {value!r}; expected a whole number above zero")
        object.__setattr__(self, "dtype", models.resolved_dtype(self.dtype))
        if self.layout == "":
            object.__setattr__(self, "layout", DEFAULT_LATENT_LAYOUT if self.latent else DEFAULT_LAYOUT)
        fitting = [tag for tag, layout in LAYOUTS.items() if layout.latent == self.latent]
        if self.layout not in fitting:
            kind = "an MLA model" if self.latent else "a model with K and V"
            raise ValueError(f"geometry.layout: {self.layout!r}; expected for {kind} one of {', '.join(fitting)}")
        if self.latent and self.kv_heads != 1:
            raise ValueError(f"geometry.kv_heads: {self.kv_heads}; expected 1 for MLA, whose heads share the latent")

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | str | Path | Any,
        *,
        block_size: int,
        dtype: str | None = None,
        layout: str = "",
    ) -> Self:
        """From a Hugging Face configuration: a mapping, an object with `to_dict`, or a path to it or its folder.

        `dtype` is the KV cache's, where it is not the weights'. Raises ValueError for a dtype that is not resolved and
        for models whose layers are not all full attention.
        """
        shape = models.read_config(config)
        return cls(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            latent=shape.latent,
            dtype=models.resolved_dtype(shape.dtype if dtype is None else dtype),
            block_size=block_size,
            layout=layout,
        )

    @classmethod
    def named(cls, name: str, *, block_size: int, dtype: str = "bfloat16", layout: str = "") -> Self:
        """A well-known model's geometry; ValueError lists the names when there is none of that name."""
        shape = models.known(name)
        return cls(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            latent=shape.latent,
            dtype=dtype,
            block_size=block_size,
            layout=layout,
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return models.ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all layers, on this rank."""
        return self.layers * self.kv_heads * self.head_dim * (1 if self.latent else 2) * self.item_bytes

    def page_payload_bytes(self, block_size: int | None = None) -> int:
        """Bytes of one page without padding, for this or another block size."""
        return self.bytes_per_token * (self.block_size if block_size is None else block_size)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page without padding."""
        return self.page_payload_bytes()

    @property
    def page_bytes(self) -> int:
        """Bytes that one page takes in host memory and on disk: the payload padded to 4 KiB."""
        return -(-self.payload_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    @property
    def memory_layout(self) -> Layout:
        """The layout that `layout` names."""
        return LAYOUTS[self.layout]

    @property
    def layout_tag(self) -> str:
        """What a page's bytes mean, in words: for the namespace, and for messages."""
        heads = f"c{self.head_dim}" if self.latent else f"h{self.kv_heads}.d{self.head_dim}"
        return f"{self.layout}/l{self.layers}.{heads}.n{self.block_size}/{self.dtype}"

    @property
    def fingerprint(self) -> bytes:
        """32 bytes (SHA-256) that are equal only for geometries whose pages mean the same, for a store's header."""
        fields = (self.layout, self.layers, self.kv_heads, self.head_dim, self.latent, self.dtype, self.block_size)
        return hashlib.sha256(encode(("kvtier.geometry.v1", *fields))).digest()

    def with_(self, **changes: Any) -> Self:
        """The same geometry with some fields changed: `with_(layout="vllm.lbhnc")`."""
        return replace(self, **changes)

    def sharded(self, world_size: int) -> Self:
        """One rank's part under tensor parallelism: KV heads divided, or copied, one each; a latent is copied whole."""
        heads = self.kv_heads
        if world_size < 1 or (heads % world_size and world_size % heads):
            raise ValueError(f"world_size: {world_size}; expected a divisor or a multiple of {heads} KV heads")
        return replace(self, kv_heads=max(1, heads // world_size))

    def array_shape(self, slots: int) -> tuple[int, ...]:
        """The shape of one array of `slots` blocks, as the layout indexes it."""
        width = self.head_dim if self.latent else 2 * self.head_dim
        sizes = {"b": slots, "2": 2, "h": self.kv_heads, "n": self.block_size, "d": self.head_dim, "c": width}
        return tuple(sizes[axis] for axis in self.memory_layout.axes)

    def allocate(self, slots: int) -> list[Any]:
        """Zeroed NumPy arrays of `slots` blocks in this layout, as `adopt` takes them."""
        layout, shape = self.memory_layout, self.array_shape(slots)
        sizes = dict(zip(layout.axes, shape, strict=True)) | {"l": self.layers}
        dtype = np.dtype(_NUMPY_DTYPES.get(self.dtype, f"u{self.item_bytes}"))
        if "l" in layout.order:  # views of one buffer
            buffer = np.zeros([sizes[axis] for axis in layout.order], dtype)
            views = buffer.transpose([layout.order.index(axis) for axis in f"l{layout.axes}"])
            return list(views)
        return [np.zeros(shape, dtype) for _ in range(self.layers * layout.per_layer)]

    def adopt(self, tensors: Mapping[str, Any] | Sequence[Any]) -> arrays.Adopted:
        """An engine's arrays as segments: `arrays.adopt` with this geometry's layout and sizes."""
        return arrays.adopt(
            tensors,
            layout=self.memory_layout,
            layers=self.layers,
            shape=self.array_shape(0),
            dtype=self.dtype,
            item_bytes=self.item_bytes,
        )
