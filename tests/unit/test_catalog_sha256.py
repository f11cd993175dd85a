"""SHA-256 against Python's, in both implementations."""

from __future__ import annotations

import hashlib

import pytest

from kvtier import _core

pytestmark = pytest.mark.parametrize("portable", [True, False], ids=["portable", "chosen"])


def test_published_vectors(portable: bool) -> None:
    vectors = {  # FIPS 180-4 examples
        b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
    }
    for data, digest in vectors.items():
        assert _core.sha256(data, portable=portable).hex() == digest


def test_every_length_around_the_block_boundaries(portable: bool) -> None:
    data = bytes(i * 167 % 256 for i in range(300))
    for length in range(len(data)):
        assert _core.sha256(data[:length], portable=portable) == hashlib.sha256(data[:length]).digest()
