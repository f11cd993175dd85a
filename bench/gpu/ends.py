"""How soon the end of a copy is known, and what noticing it takes of the processor: by poll and by call (docs/gpu.md).

A row for each size of a page: microseconds from the submission of one page's load to its report, beside those that the
copy alone takes, and the share of a core that a long load keeps busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rig import Pool, Stopwatch, arguments, host_arena, open_device, write

from kvtier import _core
from kvtier.tiers.copy_ends import ENDS, better, measure_ends

PATH = "direct"


def main() -> None:
    dry = arguments()
    device = open_device(dry)
    rows = []
    for segment in (4096,) if dry else (4096, 65536):
        pool = Pool(dry, 16 if dry else 512, 32, segment)
        arena = host_arena(device, pool.slots, pool.segments * segment)
        pinned = _core.PinnedArena(device, arena)
        pinned.wait()
        copies, one = _core.CudaCopies(device, pinned, onboard=PATH), np.zeros(1, np.uint32)

        def alone(pool: Pool = pool, arena: Any = arena, copies: Any = copies, one: Any = one) -> float:
            return float(_core.measure_path(copies, pool.native, arena, False, one, one, 1))

        limit = Stopwatch().run({"alone": alone}, 1 if dry else 32)["alone"]
        found = measure_ends(device, pool.native, arena, pinned, path=PATH, rounds=1 if dry else 9)
        row: dict[str, Any] = {"page_bytes": pool.segments * segment, "copy alone us": round(limit * 1e6, 2)}
        for way in ENDS:
            row[f"{way} us"] = round(found[way].wait_s * 1e6, 2)
            row[f"{way} of a core"] = round(found[way].processor, 4)
        rows.append(row | {"better": better(found)})
        print(rows[-1])
    write("ends", device, rows, limit="the same copy in a loop that looks at nothing else")


if __name__ == "__main__":
    main()
