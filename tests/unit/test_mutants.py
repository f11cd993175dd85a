"""The list of mistakes to plant (tests/mutants) fits the tree as it is, so that it can be run at any time."""

import re
from pathlib import Path

import pytest

from tests.mutants.planted import KINDS, PLANTED, Planted

TREE = Path(__file__).parents[2]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.kind}: {p.name}")
def test_every_mistake_can_be_planted(planted: Planted) -> None:
    assert (TREE / planted.file).read_text().count(planted.old) == 1
    assert planted.new != planted.old
    assert planted.says
    assert re.compile(planted.says)
    for test in planted.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (TREE / file).read_text()


def test_every_kind_of_mistake_is_planted() -> None:
    assert {planted.kind for planted in PLANTED} == set(KINDS)
