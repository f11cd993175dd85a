"""What one page is made of: a model's KV shape, how it lies in memory, and the segments that a slot is copied by.

    geometry = KVGeometry.from_config("model/config.json", block_size=16, dtype="bfloat16")
    geometry = KVGeometry.named("llama-3-8b", block_size=16)
    geometry.bytes_per_token, geometry.payload_bytes

`core` holds KVGeometry, `layout` the known memory layouts, `arrays` turns an engine's arrays into segments, `models`
reads Hugging Face configurations. Nothing here imports torch.
"""

from kvtier.geometry.arrays import Adopted, Segment
from kvtier.geometry.core import PAGE_ALIGNMENT, KVGeometry
from kvtier.geometry.layout import LAYOUTS, Layout

__all__ = ["LAYOUTS", "PAGE_ALIGNMENT", "Adopted", "KVGeometry", "Layout", "Segment"]
