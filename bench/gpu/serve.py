"""TTFT and TPOT against context for an 8B-class model with random weights, computed and served from each tier; then how
many requests run at once, and how much device memory they take, with offload and without.

A host hit is also set beside its bytes over the link's rate. Contexts are taken in order for as long as there is time.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rig import arguments, open_device, plain_copy, skip, write

BLOCK = 16
STORE_BYTES = 16 << 20  # room for the disk store's own files
SECONDS = float(os.environ.get("SERVE_SECONDS", "110"))


def main() -> None:
    dry = arguments()
    device = open_device(dry)
    try:
        import torch
        import transformers

        from kvtier.lab.model import random_config
    except ImportError as error:
        skip(f"the lab cannot be loaded ({error}): give the wheels of requirements/gpu.txt")
    began = time.monotonic()
    model = tiny() if dry else eight_billion(torch, transformers, random_config)
    contexts = [128, 256] if dry else [2048, 8192, 32768, 131072]
    link = None
    if not dry:
        up = plain_copy(256 << 20)[1]
        up()
        link = (256 << 20) / min(up() for _ in range(3)) / 1e9
    rows = by_context(model, contexts, dry, device, link, began)
    rows += concurrency(model, dry, device)
    write("serve", device, rows, limit="bytes of the prefix over one large pinned copy", link_gbps=link)


def tiny() -> Any:
    from kvtier.lab.model import load_model

    return load_model(seed=0)


def eight_billion(torch: Any, transformers: Any, random_config: Any) -> Any:
    """Llama-3-8B's shape in bfloat16, made on the device."""
    from kvtier.lab.attention import ATTENTION_NAME, register
    from kvtier.lab.model import LabModel

    register()
    config = random_config(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072 + 4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    return LabModel("random-8b", "random:0", network.eval(), None, torch.bfloat16, True)


def rig(model: Any, dry: bool, device: Any, blocks: int, host: int, store: Path | None, **options: Any) -> Any:
    from kvtier.config import CacheConfig
    from kvtier.lab.engine import LabEngine
    from kvtier.manager import CacheManager
    from kvtier.tiers.cuda import CudaDevice
    from kvtier.tiers.device import DevicePool

    geometry = model.geometry(BLOCK)
    pool = model.new_pool(blocks, BLOCK)
    held = DevicePool(geometry, pool.tensors, cuda=CudaDevice(device, lambda: 0) if dry else None)
    config = CacheConfig(
        block_size=BLOCK, host={"size": max(host, 1) * geometry.page_bytes, "write": "at_once" if host else "never"},
        disk={"path": store, "size": max(host, 1) * geometry.page_bytes + STORE_BYTES}, load_timeout_seconds=120.0,
        load_policy="always",
    )  # fmt: skip
    manager = CacheManager(config, geometry, model.namespace(BLOCK), held)
    return LabEngine(model, manager, pool, **options), manager, held


def by_context(model: Any, contexts: list[int], dry: bool, device: Any, link: float | None, began: float) -> list[Any]:
    from kvtier.lab.rig import empty_faster
    from kvtier.lab.workload import document, question

    rows: list[dict[str, Any]] = []
    cost = 0.0
    for context in contexts:
        if rows and time.monotonic() - began + cost * (context / rows[-1]["context"]) ** 1.3 > SECONDS:
            print(f"{context} tokens and more: no time left")
            break
        start = time.monotonic()
        blocks = context // BLOCK + 16
        with tempfile.TemporaryDirectory(prefix=".kvtier-gpu-", dir=".") as folder:
            engine, manager, held = rig(
                model, dry, device, blocks, blocks, Path(folder), chunk_tokens=64 if dry else 512, max_batch=1
            )
            with manager:
                prompt = document(model, context, 0, context) + question(model, BLOCK, 0, context)
                answer = None
                for source in ("recompute", "device", "host", "disk"):
                    empty_faster(manager, held, prompt[:context], source)
                    engine.add(f"{context}-{source}", prompt, 9, ignore_eos=True)
                    (result,) = engine.run(SECONDS)
                    manager.flush(60)
                    answer = answer or result.tokens
                    bytes_of = 0 if source in ("recompute", "device") else context // BLOCK * held.payload_bytes
                    row = {
                        "kind": "context", "context": context, "source": source, "ttft_ms": 1000 * (result.ttft or 0.0),
                        "tpot_ms": 1000 * (result.tpot or 0.0), "tokens_by_tier": result.tokens_by_tier,
                        "outputs_match": result.tokens == answer, "prefix_bytes": bytes_of,
                    }  # fmt: skip
                    if link and bytes_of:
                        row["floor_ms"] = bytes_of / link / 1e6
                    rows.append(row)
                    print({key: row[key] for key in ("context", "source", "ttft_ms", "tpot_ms", "outputs_match")})
                print(manager.describe())
        cost = time.monotonic() - start
    return rows


def concurrency(model: Any, dry: bool, device: Any) -> list[dict[str, Any]]:
    """Chats that come back for a second turn, on a device pool that holds few of them."""
    import torch

    from kvtier.lab.workload import document

    tokens, held_chats, chats = (64, 3, 8) if dry else (2048, 8, 24)
    rows = []
    for host in (0, (chats + 2) * (tokens // BLOCK + 2)):
        blocks = held_chats * (tokens // BLOCK + 2)
        if not dry:
            torch.cuda.reset_peak_memory_stats()
        engine, manager, held = rig(
            model, dry, device, blocks, host, None, chunk_tokens=64 if dry else 512, max_batch=held_chats
        )
        with manager:
            prompts = [document(model, tokens, 1, number) for number in range(chats)]
            for turn in range(2):
                start = time.monotonic()
                for number, prompt in enumerate(prompts):
                    engine.add(f"{turn}-{number}", prompt, 4, ignore_eos=True)
                most = 0
                while engine.unfinished:
                    engine.step()
                    running = sum(
                        engine.phase(f"{turn}-{n}").name in ("PREFILL", "DECODE", "LOADING") for n in range(chats)
                    )
                    most = max(most, running)
                results = engine.take_results()
                manager.flush(60)
            seconds = time.monotonic() - start
            rows.append({
                "kind": "concurrency", "offload": bool(host), "chats": chats, "tokens": tokens,
                "device_pool_bytes": held.bytes, "most_at_once": most, "second_turn_s": seconds,
                "computed_tokens": sum(result.computed_tokens for result in results),
                "device_peak_bytes": None if dry else torch.cuda.max_memory_allocated(),
            })  # fmt: skip
            print(rows[-1])
    return rows


if __name__ == "__main__":
    main()
