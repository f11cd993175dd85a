"""Memory is bounded by a stated formula and checked against the machine before it is taken."""

from pathlib import Path

import pytest

from kvtier.budget import Allowance, allowance, check_memory, memory_bound, page_bytes, slots_in
from kvtier.config import ConfigError

GIB = 1 << 30


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Allowance:
    """A made-up /proc and /sys/fs/cgroup: 16 GiB, 8 of them available."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(content)
    return allowance(proc, groups)


def test_pages_never_exceed_the_configured_size() -> None:
    for size in (4096, 10_000, 1 << 20, (1 << 20) + 1):
        bound = memory_bound(size, 3000)
        assert bound.pages <= size
        assert bound.pages == slots_in("host.size", size, 3000) * 4096


def test_the_formula_counts_every_part() -> None:
    bound = memory_bound(1 << 20, 4097, catalog=1000, queues=24)
    slots = (1 << 20) // 8192
    assert bound.total == slots * 8192 + (4 << 20) + slots * 8 + 1024
    assert "catalog 1000 B" in bound.describe()


def test_page_is_the_payload_rounded_up() -> None:
    assert [page_bytes(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]
    with pytest.raises(ValueError, match="payload_bytes: 0"):
        page_bytes(0)


def test_a_size_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^host\.size: 4KiB holds no page; expected at least 8KiB, one page$"):
        slots_in("host.size", 4096, 5000)


def test_without_groups_the_system_decides(tmp_path: Path) -> None:
    allowed = machine(tmp_path, "0::/\n", {})
    assert allowed.bytes == 8 * GIB
    assert allowed.group_left is None


def test_the_tightest_group_above_the_process_decides(tmp_path: Path) -> None:
    allowed = machine(
        tmp_path,
        "0::/a/b\n",
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "1\n",
            "a/memory.max": f"{4 * GIB}\n",
            "a/memory.current": f"{3 * GIB}\n",
            "a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert allowed.bytes == 2 * GIB  # page cache that can go at once is not used
    assert "control group's limit of 4 GiB" in allowed.limited_by


def test_a_containers_group_is_found_at_the_mounts_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}", "memory.current": "0"}
    assert machine(tmp_path, "0::/kubepods/only-the-host-sees-this\n", files).bytes == GIB


def test_version_one_groups(tmp_path: Path) -> None:
    files = {"memory/x/memory.limit_in_bytes": f"{2 * GIB}", "memory/x/memory.usage_in_bytes": f"{GIB}"}
    assert machine(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/x\n", files).bytes == GIB


def test_version_one_without_a_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": str((1 << 63) - 4096), "memory/memory.usage_in_bytes": f"{GIB}"}
    assert machine(tmp_path, "4:memory:/\n", files).group_left is None


def test_this_machine_has_an_answer() -> None:
    assert 0 < allowance().bytes <= allowance().total


def test_more_than_is_left_is_refused_in_one_line() -> None:
    allowed = Allowance(available=GIB, total=2 * GIB, group_left=None, group_limit=None)
    with pytest.raises(ConfigError, match=r"^host.size: the cache needs .*1 GiB are left of the machine's 2 GiB"):
        check_memory(memory_bound(2 * GIB, 4096), allowed)


def test_nearly_all_of_what_is_left_is_a_warning() -> None:
    allowed = Allowance(available=100 << 20, total=GIB, group_left=None, group_limit=None)
    assert "over 90 %" in (check_memory(memory_bound(90 << 20, 4096), allowed) or "")
    assert check_memory(memory_bound(10 << 20, 4096), allowed) is None


def test_the_arena_keeps_to_the_formula() -> None:
    from kvtier.tiers.host import HostArena

    for size, payload in ((1 << 20, 3000), (5 << 20, 65_536), (3 << 20, 4097)):
        bound = memory_bound(size, payload)
        arena = HostArena(slots_in("host.size", size, payload), payload)
        assert arena.page_bytes == page_bytes(payload)
        assert bound.pages <= arena.bytes <= bound.pages + bound.rounding
