"""The cache in an engine of your own: no GPU, no model needed. Run it as it is: python examples/embed.py"""

import tempfile

from kvtier import CacheConfig, CacheManager, DevicePool, KVGeometry, Namespace, Tier

geometry = KVGeometry.named("smollm2-135m", block_size=16)  # or KVGeometry.from_config(your_hf_config, ...)
names = Namespace(
    model="smollm2-135m", revision="a-commit-hash", dtype="bfloat16", rope={"rope_theta": 1e5},
    layout=geometry.layout_tag, attention="sdpa/cpu", block_size=16,
)  # fmt: skip
pool = DevicePool.allocate(geometry, slots=64)  # or DevicePool(geometry, your_kv_tensors)


def serve(cache: CacheManager, name: str, prompt: list[int]) -> dict[str, int]:
    """One request from start to end; returns where its prefix was found, in tokens by tier."""
    found = cache.get_computed_blocks(name, prompt)  # a lease holds every page that was found
    if cache.allocate_slots(name, len(prompt)) is None:  # starts the loads, gives slots for the rest
        raise RuntimeError("the device is full now: wait, preempt or free")
    while not cache.ready(name):
        cache.poll(timeout=0.1)  # your engine would run other requests meanwhile
    start = cache.num_computed_tokens(name)  # what really arrived: a fault makes it less than was found
    slots = cache.block_table(name)  # here your model computes tokens [start, len(prompt)) into these
    assert start == found.num_tokens
    assert len(slots) == -(-len(prompt) // 16)
    cache.cache_blocks(name, len(prompt))  # a prompt may be computed in parts, each followed by this
    for token in range(3, 23):  # each pass makes a token for every request of its batch, this one here
        if None in cache.advance({name: token}).values():  # else these are the slots by which block tables have grown
            raise RuntimeError("the device is full now: preempt somebody")
    cache.free(name)
    return found.tokens_by_tier


with tempfile.TemporaryDirectory(dir=".") as folder:
    config = CacheConfig(host={"size": "256MiB"}, disk={"path": folder, "size": "256MiB"})
    with CacheManager(config, geometry, names, pool) as cache:
        print(cache.describe())
        prompt = list(range(1000, 1500))
        print("first time:", serve(cache, "a", prompt))
        print("again:     ", serve(cache, "b", prompt))
        cache.flush()  # let what goes down in the background arrive
        cache.evict(Tier.DEVICE, prompt)  # done on purpose here; in life other requests do it
        print("from host: ", serve(cache, "c", prompt))
        cache.evict(Tier.DEVICE, prompt)
        cache.evict(Tier.HOST, prompt)
        print("from disk: ", serve(cache, "d", prompt))
