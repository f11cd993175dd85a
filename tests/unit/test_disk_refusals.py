"""Every way a disk tier cannot be had is one line that begins with the key at fault, and leaves nothing behind."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_kit import TAG, disk_folder, make
from kvtier import _core
from kvtier.cli import main
from kvtier.config import CacheConfig, ConfigError
from kvtier.tiers.disk import DiskStore


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with disk_folder(tmp_path) as found:
        yield found


def _named(folder: Path, kind: str) -> Path:
    """A path of the ``kind`` in which no store can be."""
    if kind == "a file":
        (folder / "file").touch()
        return folder / "file"
    if kind == "not there":
        return folder / "absent"
    if kind == "below a file":
        (folder / "file").touch()
        return folder / "file" / "below"
    path = {"in memory": Path("/dev/shm"), "proc": Path("/proc/self"), "sys": Path("/sys")}[kind]
    if not path.is_dir():
        pytest.skip(f"no {path} on this machine")
    return path


@pytest.mark.parametrize("kind", ["a file", "not there", "below a file", "in memory", "proc", "sys"])
def test_a_path_that_can_hold_no_store(folder: Path, kind: str) -> None:
    path = _named(folder, kind)
    before = set(folder.iterdir())
    with pytest.raises(ConfigError, match=rf"^disk\.path: {path}: .*; expected .*directory") as caught:
        make(path)
    assert "\n" not in str(caught.value)
    assert set(folder.iterdir()) == before
    assert main.main(["doctor", "--path", str(path)]) == 2


@pytest.mark.parametrize(
    ("size", "words"), [("4KiB", "holds no page; expected at least"), ("900TiB", "expected a sma")]
)
def test_a_size_that_cannot_be(folder: Path, size: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^disk\.size: .*{words}"):
        make(folder, slots=None, size=size, payload_bytes=1 << 20)
    assert not list(folder.iterdir())


def test_a_store_of_another_geometry_stays_as_it_is(folder: Path) -> None:
    make(folder).close()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    with pytest.raises(ConfigError, match=r"^disk\.path: .* another geometry .*; expected the store as it was made"):
        make(folder, geometry_tag=TAG[::-1])
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def test_a_store_that_this_process_has_open(folder: Path) -> None:
    with make(folder), pytest.raises(ConfigError, match=r"^disk\.path: .*: in use by this process; expected"):
        make(folder)
    make(folder).close()


@pytest.mark.parametrize(
    ("error", "kind", "begins"),
    [
        (errno.ENOSPC, ConfigError, "disk.size: "),
        (errno.EDQUOT, ConfigError, "disk.size: "),
        (errno.EACCES, ConfigError, "disk.path: "),
        (errno.EROFS, ConfigError, "disk.path: "),
        (errno.EIO, OSError, "disk.path: "),
    ],
)
def test_whatever_file_operation_fails_at_creation(
    folder: Path, error: int, kind: type[Exception], begins: str
) -> None:
    """n = 1, 2, 3, ... until nothing fails."""
    refusals = 0
    for n in range(1, 100):
        plan = _core.FaultPlan()
        plan.add(_core.FaultPlan.Kind.ERROR, n, error)
        _core.use_faults(plan)
        try:
            make(folder).close()
        except kind as caught:
            words = caught.strerror if isinstance(caught, OSError) else str(caught)
            assert words.startswith(begins), words
            assert os.strerror(error) in words or words.endswith("; expected a writable directory"), words
            assert "\n" not in words
            assert not list(folder.iterdir()), f"operation {n}"
            refusals += 1
        else:
            for path in folder.iterdir():
                path.unlink()
        finally:
            _core.use_faults(None)
        if not plan.fired:  # with some that do fail a store can be made: direct I/O may be refused
            break
    assert refusals > 10


def test_home_is_the_user_s_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    config = CacheConfig.load_from(environ={}, **{"disk.path": f"~/{folder.name}"})
    assert config.disk.path == folder
    with pytest.raises(ConfigError, match=r"^disk\.path: .*expected a path without ~$"):
        CacheConfig.load_from(environ={}, **{"disk.path": "~nobody-of-this-name/kv"})


def test_a_store_without_a_path() -> None:
    with pytest.raises(ConfigError, match=r"^disk\.path: not set; expected an existing, writable directory"):
        DiskStore.open(CacheConfig(), None)  # type: ignore[arg-type]
