"""Memory layouts that device blocks come in. A layout is named by whoever made the arrays and never guessed.

Axes: b block, 2 K and V, h KV head, n token in block, d head dimension, c what a token's row holds (K‖V of one head in
vLLM, the latent in MLA), l layer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which KV lies in memory."""

    tag: str
    axes: str  # an array's axes, as it is indexed
    order: str  # its axes as they lie in memory, slowest first; with l: all layers' arrays are views of one buffer
    per_layer: int  # arrays per layer: 2 where K and V are apart
    about: str

    @property
    def latent(self) -> bool:
        """One compressed vector per token (MLA) in place of K and V."""
        return self.tag.startswith("mla.")

    @property
    def layers_inside(self) -> bool:
        """All layers of a block lie side by side, so that a page is one segment."""
        return self.order.startswith("bl")


_ALL = [
    Layout("stacked.b2hnd", "b2hnd", "b2hnd", 1, "one array per layer [B, 2, H, N, D]; the lab's own"),
    Layout("stacked.b2nhd", "b2nhd", "b2nhd", 1, "one array per layer [B, 2, N, H, D]"),
    Layout("stacked.2bhnd", "2bhnd", "2bhnd", 1, "one array per layer [2, B, H, N, D]"),
    Layout("stacked.2bnhd", "2bnhd", "2bnhd", 1, "one array per layer [2, B, N, H, D]"),
    Layout("split.bhnd", "bhnd", "bhnd", 2, "per layer K then V, each [B, H, N, D]"),
    Layout("split.bnhd", "bnhd", "bnhd", 2, "per layer K then V, each [B, N, H, D]"),
    Layout("vllm.lbhnc", "bhnc", "lbhnc", 1, "vLLM's per-layer views [B, H, N, 2D] of one buffer, layer first"),
    Layout("vllm.blhnc", "bhnc", "blhnc", 1, "vLLM's per-layer views [B, H, N, 2D] of one buffer, block first"),
    Layout("vllm.lbnhc", "bhnc", "lbnhc", 1, "the same views, layer first, tokens before heads in memory"),
    Layout("vllm.blnhc", "bhnc", "blnhc", 1, "the same views, block first, tokens before heads in memory"),
    Layout("mla.bnc", "bnc", "bnc", 1, "one latent array per layer [B, N, C]"),
]
LAYOUTS: dict[str, Layout] = {layout.tag: layout for layout in _ALL}
DEFAULT_LAYOUT = "stacked.b2hnd"
DEFAULT_LATENT_LAYOUT = "mla.bnc"
