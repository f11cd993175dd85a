"""Made-up benchmark results, for tests of what is done with them."""

from collections.abc import Iterable

from kvtier.lab.results import (
    BenchResult,
    BytesMoved,
    ConcurrencyRow,
    ContextRow,
    LaneRate,
    LoadRow,
    Machine,
    Model,
    Spread,
    TokensByTier,
)


def _ms(values: Iterable[float]) -> Spread:
    return Spread.of(value / 1000 for value in values)


def context_rows(contexts: tuple[int, ...] = (512, 2048, 8192), *, geometry: bool = False) -> list[ContextRow]:
    """Recompute grows as the context does, hits far less."""
    rows = []
    for context in contexts:
        whole = context * 3.0
        for tier, ms in (
            ("recompute", whole),
            ("device", 180.0),
            ("host", 185 + context / 64),
            ("disk", 190 + context / 20),
        ):
            hit = {tier: context, "computed": 16} if tier != "recompute" else {"computed": context + 16}
            modelled = geometry and tier == "recompute"
            rows.append(
                ContextRow(
                    context=context,
                    tier=tier,
                    kind="modelled" if modelled else "measured load" if geometry else "measured",
                    n=0 if modelled else 10,
                    ttft_ms=Spread(mean=ms, p50=ms) if modelled else _ms(ms * (1 + i / 60) for i in range(10)),
                    tpot_ms=Spread() if geometry else _ms(40.0 + i for i in range(10)),
                    tokens_by_tier=TokensByTier(**hit),
                    bytes_moved=BytesMoved(host_to_device=context * 46080 if tier in ("host", "disk") else 0),
                    device_bytes=400 << 20,
                    outputs_match=None if modelled else True,
                    ttft_to_recompute=None if tier == "recompute" or geometry else ms / whole,
                    floor_ms=context / 70 if tier in ("host", "disk") else None,
                    floor_is="host_to_device at 6.2 GB/s" if tier in ("host", "disk") else None,
                    ttft_to_floor=ms / (context / 70) if tier in ("host", "disk") else None,
                )
            )
    return rows


def load_rows(users: tuple[int, ...] = (1, 4, 16, 64)) -> list[LoadRow]:
    """Offload pays where the working set is larger than the pool."""
    rows = []
    for working_set in (0.5, 3.0, 10.0):
        for offload in (False, True):
            for count in users:
                slow = 4.0 if working_set > 1 and not offload else 1.0
                rows.append(
                    LoadRow(
                        users=count,
                        working_set=working_set,
                        offload=offload,
                        conversations=int(20 * working_set),
                        tokens_per_conversation=1024,
                        rounds=4,
                        n=int(80 * working_set),
                        duration_s=60.0 * slow,
                        ttft_ms=_ms(200 * slow * count**0.7 * (1 + i / 40) for i in range(40)),
                        tpot_ms=_ms([30.0 * count**0.5]),
                        requests_per_s=count**0.3 / slow,
                        peak_memory_bytes=(900 << 20) + (300 << 20) * offload,
                        tokens_by_tier=TokensByTier(device=1000, host=500 * offload, computed=300),
                        recomputed_tokens=0 if offload else 500,
                        preemptions=2,
                        bytes_moved=BytesMoved(host_to_device=(1 << 28) * offload),
                        device_bytes=400 << 20,
                        outputs_match=True if offload else None,
                    )
                )
    return rows


def concurrency_rows() -> list[ConcurrencyRow]:
    """Off ends at 8; on reaches the limit of the search."""
    shared = {"tokens_per_conversation": 256, "device_bytes": 400 << 20}
    return [
        ConcurrencyRow(offload=False, max_concurrent_requests=8, at_least=False, **shared),
        ConcurrencyRow(offload=True, max_concurrent_requests=64, at_least=True, **shared),
    ]


def result(*, geometry: bool = False) -> BenchResult:
    """A whole result; with ``geometry`` its recompute is modelled and there is no load table."""
    return BenchResult(
        date="2026-01-02T03:04:05+00:00",
        machine=Machine(
            cpu="Some <CPU>", cores=2, memory_bytes=24 << 30, os="Linux 6.1", gpu=None, disk="/dev/vda, ext4",
            software={"python": "3.11.2", "torch": "2.13.0"},
        ),
        model=Model(
            name="llama-3-8b" if geometry else "SmolLM2-135M-Instruct", revision=None if geometry else "sha256:ab",
            dtype="float32", weights="none" if geometry else "real", kv_bytes_per_token=46080, context_limit=8192,
        ),
        config={"block_size": 16, "host": {"size": 1 << 30}},
        io="direct, io_uring",
        device="host memory",
        contexts=context_rows(geometry=geometry),
        load=[] if geometry else load_rows(),
        concurrency=[] if geometry else concurrency_rows(),
        lanes=[LaneRate(lane="host_to_device", bytes=1 << 30, seconds=0.2)],
        notes=["A note with <angle brackets>."],
    )  # fmt: skip
