"""The journal of generations: what was invalidated once is never valid again, whatever became of the file."""

import json
import stat

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.journal import Journal
from kvtier.messages import Hello

SPACE = bytes(range(32))


def hello(generation=0, pages=()):
    identities = np.zeros((len(pages), 144), np.uint8)
    for row, of in zip(identities, pages, strict=True):
        row[96:104] = np.frombuffer(np.uint64(of).tobytes(), np.uint8)
    return Hello({Tier.DISK: 10}, 4096, np.arange(len(pages), dtype=np.uint32), identities, generation)


def test_generations_survive_a_restart(tmp_path):
    path = tmp_path / "generations"
    journal = Journal.open(path, [hello()])
    assert journal.generation(SPACE) == 0
    assert journal.advance(SPACE) == 1
    assert journal.advance(None) == 2
    assert journal.advance(SPACE) == 3
    again = Journal.open(path, [hello()])
    assert (again.generation(SPACE), again.generation(b"x" * 32)) == (3, 2)
    assert dict(again.entries()) == {None: 2, SPACE: 3}
    assert not again.warnings
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_journal_is_never_behind_the_stores(tmp_path):
    path = tmp_path / "generations"
    Journal.open(path, [hello()])
    assert Journal.open(path, [hello(generation=4), hello(generation=2)]).generation(SPACE) == 4


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{",
        b"[1]",
        b'{"version": 2, "all": 1, "spaces": {}}',
        b'{"version": 1, "all": -1, "spaces": {}}',
        b'{"version": 1, "all": 1e99, "spaces": {}}',
        b'{"version": 1, "all": true, "spaces": {}}',
        b'{"version": 1, "all": 0, "spaces": {"00": 1}}',
        b'{"version": 1, "all": 0, "spaces": {"zz": 1}}',
        b'{"version": 1, "all": 0, "spaces": []}',
        b" " * (1 << 21),
    ],
)
def test_a_lost_or_damaged_journal_invalidates_everything(tmp_path, content):
    path = tmp_path / "generations"
    if content is not None:
        path.write_bytes(content)
    journal = Journal.open(path, [hello(pages=[3, 7])])
    assert journal.generation(SPACE) == 8
    assert "dropped" in journal.warnings[0]
    assert json.loads(path.read_bytes())["all"] == 8


def test_without_pages_a_missing_journal_is_only_new(tmp_path):
    journal = Journal.open(tmp_path / "generations", [hello()])
    assert journal.generation(SPACE) == 0
    assert not journal.warnings


def test_an_invalidation_that_cannot_be_kept_is_in_force(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    journal = Journal.open(folder / "generations", [hello()])
    (folder / "generations").unlink()
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        journal.advance(None)
    assert journal.generation(SPACE) == 1


def test_more_namespaces_than_it_remembers_rise_together(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.journal.MOST_SPACES", 2)
    journal = Journal.open(tmp_path / "generations", [hello()])
    spaces = [bytes([n]) * 32 for n in range(3)]
    assert [journal.advance(space) for space in spaces] == [1, 1, 2]
    assert [journal.generation(space) for space in spaces] == [2, 2, 2]
