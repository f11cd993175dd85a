"""Mistakes worth planting: each an edit of the source that breaks one promise, the tests that must turn red by it, and
what their message must say. `python -m tests.mutants.run` plants them one by one; see docs/reliability.md.
"""

from __future__ import annotations

from tests.mutants import pages, steps, stores, waits
from tests.mutants.mistake import Planted

__all__ = ["KINDS", "PLANTED", "Planted"]

KINDS = (*pages.KINDS, *steps.KINDS, *stores.KINDS, *waits.KINDS)
PLANTED = (*pages.PLANTED, *steps.PLANTED, *stores.PLANTED, *waits.PLANTED)
