"""Each reason why a directory cannot hold a disk tier has a line of its own, and a trial leaves nothing behind."""

import os
from pathlib import Path

import pytest

from disk_kit import disk_folder, in_child
from kvtier import _core


def test_finds_out_by_doing_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        found = _core.probe_io(str(folder))
        assert found.why.startswith(found.filesystem + ": ")
        assert ("direct I/O is refused" in found.why) != found.direct
        assert ("through io_uring" in found.why) == found.uring
        assert list(folder.iterdir()) == []


def test_names_a_missing_path_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^disk\.path: .*/absent: does not exist; expected an existing directory"):
        _core.probe_io(str(tmp_path / "absent"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^disk\.path: .*/file: is not a directory; expected an existing"):
        _core.probe_io(str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"is not a directory|Not a directory"):
        _core.probe_io(str(tmp_path / "file" / "below"))


def test_refuses_memory_as_a_disk() -> None:
    shm = Path("/dev/shm")
    if not (shm.is_dir() and os.access(shm, os.W_OK)):
        pytest.skip("no tmpfs on this machine")
    before = set(shm.iterdir())
    with pytest.raises(ValueError, match=r"^disk\.path: /dev/shm: is on tmpfs, which is memory"):
        _core.probe_io(str(shm))
    assert set(shm.iterdir()) <= before


@pytest.mark.parametrize("path", ["/proc", "/sys"])
def test_refuses_what_stores_no_files(path: str) -> None:
    with pytest.raises(ValueError, match=rf"^disk\.path: {path}: is on (proc|sysfs), which stores no files; expected"):
        _core.probe_io(path)


READ_ONLY = """
import os, sys
from kvtier import _core
if os.getuid() == 0:
    os.chmod(os.path.dirname(sys.argv[1]), 0o755)
    os.chdir(sys.argv[1])
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    _core.probe_io(".")
except ValueError as error:
    print(error)
"""


def test_names_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        folder.chmod(0o555)
        child = in_child(READ_ONLY, folder)
        folder.chmod(0o755)
    assert child.stdout == "disk.path: .: is not writable for this user; expected a writable directory\n", child.stderr
