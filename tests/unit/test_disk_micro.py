"""The disk tier's figures measure what they say."""

import os
from pathlib import Path

import numpy as np
import pytest

from disk_kit import disk_folder
from kvtier.lab.micro import disk


def test_figures_come_with_their_limit_and_leave_nothing_behind(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        found = list(disk.figures(folder, page_sizes=(64 << 10,), total=2 << 20, pairs=1))
        assert [figure.name.split(",")[0] for figure in found] == ["disk page write", "disk page read"]
        for figure in found:
            assert figure.unit == "GB/s"
            assert figure.limit is not None
            assert figure.limit_is is not None
            assert figure.ratio is not None
            assert min(figure.value, figure.limit, figure.ratio) > 0
            assert "io_uring loop" in figure.limit_is
        assert list(folder.iterdir()) == []


def test_a_page_that_was_damaged_on_disk_is_no_figure(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder, disk.DiskBench(folder, 64 << 10, 1 << 20) as bench:
        bench.ours("write")
        kept = bench.memory.copy()
        bench.memory[:] = 0
        assert bench.ours("read") > 0
        assert (bench.memory == kept).all()
        bench.ours("write")
        os.pwrite(os.open(bench.store.path / "slab", os.O_WRONLY), b"damage", 5 * bench.page_bytes + 99)
        with pytest.raises(RuntimeError, match="pages ended with status"):
            bench.ours("read")


def test_the_loop_of_the_limit_moves_every_page_in_its_order(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder, disk.DiskBench(folder, 4096, 64 << 12) as bench:
        assert bench.raw("write") > 0
        on_disk = np.fromfile(bench.folder / "raw", np.uint8).reshape(-1, 4096)
        assert (on_disk[bench.order] == bench.memory.reshape(-1, 4096)).all()
        kept = bench.memory.copy()
        bench.memory[:] = 0
        assert bench.raw("read") > 0
        assert (bench.memory == kept).all()
