"""The worker's side: this rank's data plane over vLLM's own KV cache, and the orders of each step carried out on it.

In a step: what reads blocks that the step writes ends first, then loads begin and run beside the computation, which
waits for those that it reads (:mod:`kvtier.connectors.vllm.step_loads`); then, the step's KV being computed, stores
begin and run beside whatever follows. Copies are native and need no GIL.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from kvtier.catalog import PageStatus, Tier
from kvtier.config import CacheConfig, ConfigError
from kvtier.connectors.vllm import support
from kvtier.connectors.vllm.metadata import Introduction, StepOrders, WorkerReport
from kvtier.connectors.vllm.pass_clock import PassClock
from kvtier.connectors.vllm.step_loads import StepLoads
from kvtier.geometry import KVGeometry
from kvtier.layers import Layers
from kvtier.messages import Completion, Order, Transfer
from kvtier.plane import LocalDataPlane
from kvtier.relay import RankPlane
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.config import VllmConfig

    from kvtier.connectors.vllm.settings import Settings

__all__ = ["WorkerSide", "geometry_of"]

HASH_BYTES = 32
STORE_PATIENCE = 0.001  # seconds that a step waits for a store that reads what it writes, before it is cancelled
IDLE_PATIENCE = 0.005  # seconds that a step without computation waits for news, in place of the engine's loop
BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")  # by one of which vLLM binds a CPU worker's threads
CLOSE_PATIENCE = 5.0  # seconds for stores under way when the worker ends

logger = init_logger(f"vllm.{__name__}")


def geometry_of(tensors: Mapping[str, torch.Tensor]) -> KVGeometry:
    """What vLLM's per-layer views are: ``[blocks, KV heads, tokens, K‖V]`` over one buffer, in an order that their
    strides tell; of MLA one head, whose row is the latent. ValueError for anything else."""
    shapes = {(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors.values()}
    if len(shapes) != 1:
        raise ValueError(f"kv_caches: layers of {len(shapes)} kinds; expected all of one shape, layout and dtype")
    first = next(iter(tensors.values()))
    if first.dim() != 4 or first.shape[3] % 2:
        raise ValueError(f"kv_caches: {list(first.shape)}; expected [blocks, KV heads, tokens, K and V]")
    blocks, heads, tokens, row = first.shape
    if heads > 1 and blocks > 1 and first.stride(1) > first.stride(0):
        raise ValueError("kv_caches: a block's heads lie apart; expected them together: VLLM_KV_CACHE_LAYOUT=LBHNC")
    block = math.prod((heads, tokens, row))
    across = blocks > 1 and first.stride(0) != block  # a block's layers side by side, or a layer's blocks
    tokens_first = heads > 1 and tokens > 1 and first.stride(2) > first.stride(1)
    layout = f"vllm.{'bl' if across else 'lb'}{'nh' if tokens_first else 'hn'}c"
    return KVGeometry(
        layers=len(tensors),
        kv_heads=heads,
        head_dim=row // 2,
        dtype=str(first.dtype).removeprefix("torch."),
        block_size=tokens,
        layout=layout,
    )


@contextmanager
def _unbound() -> Iterator[None]:
    """Threads that begin in here may run wherever the engine may. The worker's own thread is bound to a core on which
    it computes, and they would stay there, beside the cores that vLLM leaves free for its connector."""
    own = os.sched_getaffinity(0)
    bound = any(name in os.environ for name in BINDINGS)
    if bound:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        if bound:
            os.sched_setaffinity(0, own)


@dataclass
class _Loading:
    blocks: np.ndarray[Any, np.dtype[np.uint32]]
    tickets: set[int]
    failed: set[int] = field(default_factory=set)


class WorkerSide:
    """One rank's part. Every call comes from the worker's own thread."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings, rank: int) -> None:
        self._config, self._settings, self._rank = vllm_config, settings, rank
        self._world = vllm_config.parallel_config.tensor_parallel_size
        self._plane: LocalDataPlane | None = None
        self._rank_plane: RankPlane | None = None
        self._step_loads: StepLoads | None = None
        self._pass_clock = PassClock(torch.device("cpu"))
        self.layers_ask = True
        """Whether the layers of this step's pass have anything to wait for."""
        self._introduction: Introduction | None = None
        self._loading: dict[str, _Loading] = {}
        self._by_ticket: dict[int, tuple[str, Transfer]] = {}
        self._news: list[Completion] = []
        self._invalid: set[int] = set()
        self._void: set[str] = set()
        self._spoilt: set[int] = set()  # stores of what this step computes behind loads that failed

    # ---- at start ------------------------------------------------------------------------------------------------

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Build the data plane over the engine's KV cache. ConfigError, ValueError or OSError for what cannot be."""
        geometry = geometry_of(tensors)
        if geometry.block_size != (block := self._settings.cache.block_size):
            raise ValueError(
                f"kv_caches: blocks of {geometry.block_size} tokens, but of {block} in vLLM's scheduler; expected both "
                f"alike: --block-size {geometry.block_size}"
            )
        device = next(iter(tensors.values())).device
        self._pass_clock = PassClock(device)
        with _unbound():
            plane = LocalDataPlane(
                self._sized(),
                geometry,
                DevicePool(geometry, dict(tensors)),
                label_bytes=HASH_BYTES,
                rank=self._rank,
                world=self._world,
            )
        self._plane, self._rank_plane = plane, RankPlane(plane)
        layers = Layers(geometry.layers, geometry.payload_bytes)
        self._step_loads = StepLoads(self._rank_plane, layers, tensors)
        self._introduction = Introduction(
            plane.hello(), geometry, self._attention(next(iter(tensors)), device), plane.describe()
        )
        for line in (plane.describe(), *plane.warnings()):
            logger.info("kvtier, rank %d: %s", self._rank, line)

    def _sized(self) -> CacheConfig:
        """The configuration with this rank's share of each tier, and its own folder."""
        config = self._settings.cache
        host = config.host.model_copy(update={"size": config.host.size // self._world})
        disk = config.disk
        if disk.path is not None:
            if not disk.path.is_dir():
                raise ConfigError(f"disk.path: {str(disk.path)!r} is no directory; expected one that exists")
            folder = support.engine_folder(disk.path, self._config) / f"rank-{self._rank}-of-{self._world}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk = disk.model_copy(update={"path": folder, "size": disk.size // self._world})
        return config.model_copy(update={"host": host, "disk": disk})

    def _attention(self, layer: str, device: torch.device) -> str:
        """The kernel and its instruction set: they decide what lies where in a block, and how sums are rounded."""
        module = self._config.compilation_config.static_forward_context[layer]
        backend = module.get_attn_backend().get_name()
        if device.type == "cuda":
            machine = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        else:
            machine = torch.backends.cpu.get_cpu_capability()
        return f"{backend}/{getattr(module, 'isa', 'any')}/{machine}/torch-{torch.__version__}"

    @property
    def introduction(self) -> Introduction | None:
        return self._introduction

    # ---- in each step --------------------------------------------------------------------------------------------

    def before_forward(self, step: StepOrders) -> None:
        """End what reads the blocks that are written now; begin to load."""
        rank, step_loads = self._rank_plane, self._step_loads
        if rank is None or step_loads is None:
            return
        self._spoilt.clear()
        rank.drain(step.must_end, STORE_PATIENCE)
        for request, load in step.loads.items():
            self._loading[request] = _Loading(load.blocks, set(load.tickets), set(load.lost.tolist()))
        for order in step.orders:
            if isinstance(order, Transfer) and order.path[-1] == Tier.DEVICE:
                owner = next((r for r, load in step.loads.items() if order.ticket in load.tickets), None)
                if owner is not None:
                    self._by_ticket[order.ticket] = (owner, order)
        self._void |= set(step.void) & self._loading.keys()
        rank.carry_out(order for order in step.orders if not _is_store(order))
        step_loads.begin({name: load for name, load in step.loads.items() if load.synchronous}, step.orders)
        self.layers_ask = step_loads.asks
        self._pass_clock.begin(step.timed)

    def before_pass(self) -> None:
        """The model is about to compute."""
        if self._step_loads is not None:
            self._step_loads.before_pass()

    def wait_for_layer(self, name: str) -> None:
        """The model is about to read this layer's KV."""
        if self._step_loads is not None:
            self._step_loads.wait_for_layer(name)

    def pass_ended(self) -> None:
        """The model has been queued, or has computed; sampling follows, where vLLM says so."""
        self._pass_clock.end()

    def after_forward(self, step: StepOrders) -> None:
        """The step's KV is computed: begin to store, but nothing that was computed behind a load that failed."""
        rank = self._rank_plane
        if rank is None:
            return
        self._pass_clock.end()
        self._end_synchronous(step)
        for order in step.orders:
            if isinstance(order, Transfer) and order.ticket in self._spoilt:
                rank.refuse(order)
            elif _is_store(order):
                rank.carry_out((order,))

    def _end_synchronous(self, step: StepOrders) -> None:
        """Once the pass is over, whichever of vLLM's calls comes first. vLLM hears of these loads by what is missing
        alone; of a pass that ran ahead of its load it has to hear of a block too."""
        assert self._step_loads is not None
        late = self._step_loads.end(computed=not step.idle)
        if not any(load.synchronous for load in step.loads.values()):
            return
        self._take_news()
        for request, load in step.loads.items():
            loading = self._loading.pop(request, None) if load.synchronous else None
            if loading is None:
                continue
            if request in late:
                loading.failed.add(int(loading.blocks[-1]))
            if loading.failed:
                self._invalid |= loading.failed
                self._spoilt.update(load.stores)

    def ended_loads(self, step: StepOrders | None) -> set[str]:
        """Requests nothing of whose loads can touch a block any more; see :meth:`take_invalid` for what is missing."""
        rank = self._rank_plane
        if rank is None:
            return set()
        if step is not None:
            self._end_synchronous(step)
        if not self._take_news() and step is not None and step.idle and rank.plane.pending():
            rank.plane.wait(IDLE_PATIENCE)
            self._take_news()
        for line in rank.refused:
            logger.warning("kvtier, rank %d: %s", self._rank, line)
        rank.refused.clear()
        ended = {request for request, loading in self._loading.items() if not loading.tickets}
        for request in ended:
            loading = self._loading.pop(request)
            self._invalid |= set(loading.blocks.tolist()) if request in self._void else loading.failed
            self._void.discard(request)
        return ended

    def _take_news(self) -> bool:
        """Note what the data plane says; whether it said anything."""
        news = self._rank_plane.poll() if self._rank_plane is not None else []
        self._news += news
        for done in news:
            self._note(done)
        return bool(news)

    def _note(self, done: Completion) -> None:
        known = self._by_ticket.get(done.ticket)
        if known is None or (done.status[-1] == PageStatus.PENDING).any():  # the engine's blocks may still be written
            return
        request, order = self._by_ticket.pop(done.ticket)
        loading = self._loading[request]
        loading.failed |= set(order.slots[-1][(done.status != PageStatus.OK).any(axis=0)].tolist())
        loading.tickets.discard(done.ticket)

    def take_invalid(self) -> set[int]:
        """The engine's blocks that were to be loaded and were not, of the requests that have ended since last time."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> WorkerReport | None:
        news, self._news = self._news, []
        passes = self._pass_clock.take()
        return WorkerReport({self._rank: news} if news else {}, passes) if news or passes else None

    def close(self) -> None:
        """Let the copies that are under way end, then give memory, threads and files back."""
        plane, self._plane, self._rank_plane, self._step_loads = self._plane, None, None, None
        if plane is None:
            return
        for _ in range(int(CLOSE_PATIENCE / 0.1)):
            if not plane.pending():
                break
            plane.wait(0.1)
            plane.poll()
        plane.close()


def _is_store(order: Order) -> bool:
    return isinstance(order, Transfer) and order.path[0] == Tier.DEVICE
