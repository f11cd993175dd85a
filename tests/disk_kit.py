"""What the tests of the disk tier share: a small store and pages to put in it."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.tiers.disk import DiskStore

LABEL_BYTES = 64  # 16 tokens
IDENTITY_BYTES = 112 + LABEL_BYTES
RECORD_BYTES = 256
PAYLOAD = 3000
PAGE = 4096
HEADER = 4096
SLOTS = 8
JOURNAL = 64  # entries; a small one is full soon
TAG = hashlib.sha256(b"geometry").digest()
SPACE_A = hashlib.sha256(b"a").digest()
SPACE_B = hashlib.sha256(b"b").digest()


@contextmanager
def disk_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on a real disk: below tmp_path, or beside the code where that is in memory."""
    try:
        _core.probe_io(str(tmp_path))
    except ValueError:
        with tempfile.TemporaryDirectory(dir=Path(__file__).parents[1]) as elsewhere:
            yield Path(elsewhere)
    else:
        folder = tmp_path / "store"
        folder.mkdir()
        yield folder


def identity(number: int, space: bytes = SPACE_A, generation: int = 0) -> npt.NDArray[np.uint8]:
    """The identity of page `number`; unlike any other's."""
    found = np.zeros(IDENTITY_BYTES, np.uint8)
    digest = hashlib.sha256(b"%d" % number + space).digest()
    found[:32] = np.frombuffer(digest, np.uint8)
    found[32:64] = np.frombuffer(hashlib.sha256(digest).digest(), np.uint8)
    found[64:96] = np.frombuffer(space, np.uint8)
    found[96:104].view("<u8")[0] = generation
    found[108:112].view("<u4")[0] = number
    found[112:] = np.random.default_rng(number).integers(0, 256, LABEL_BYTES, np.uint8)
    return found


def checksum(number: int) -> int:
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**64


def page(number: int) -> npt.NDArray[np.uint8]:
    """Page-aligned bytes of page `number`."""
    memory = np.empty(2 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    aligned = memory[start : start + PAGE]
    aligned[:] = np.random.default_rng(number).integers(0, 256, PAGE, np.uint8)
    return aligned


def make(path: Path, **changes: object) -> DiskStore:
    options: dict[str, object] = {
        "slots": SLOTS,
        "payload_bytes": PAYLOAD,
        "label_bytes": LABEL_BYTES,
        "geometry_tag": TAG,
        "journal_entries": JOURNAL,
    }
    if "size" in changes:
        del options["slots"]
    return DiskStore(path, **(options | changes))  # type: ignore[arg-type]


def put(store: DiskStore, slot: int, number: int, space: bytes = SPACE_A, generation: int = 0) -> int:
    """Write page `number` as the mover does: clear, page, record. The record's status."""
    assert store.native.clear_record(slot) == 0
    assert os.pwrite(store.native.fd, page(number), store.native.offset(slot)) == PAGE
    return store.native.write_record(slot, identity(number, space, generation), checksum(number))


def served(store: DiskStore, slot: int, number: int, space: bytes = SPACE_A, generation: int = 0) -> bool:
    """Whether the store would serve page `number` from the slot; never under a checksum that is not the page's."""
    found = store.native.checksum_for(slot, identity(number, space, generation))
    assert found in (0, checksum(number))
    return bool(found)


def held(store: DiskStore) -> dict[int, bytes]:
    """slot → identity of all records, as a restart sees them."""
    slots, identities = store.records()
    assert identities.shape == (len(slots), IDENTITY_BYTES)
    return {int(slot): found.tobytes() for slot, found in zip(slots, identities, strict=True)}


def in_child(code: str, *args: object, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a process of its own; `sys.argv[1:]` are the arguments."""
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(root), str(root / "tests")))}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", code, *map(str, args)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        **({"timeout": 120} | options),
    )
