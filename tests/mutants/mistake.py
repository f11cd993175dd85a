"""A mistake that can be planted."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STORIES", "Planted"]

STORIES = "tests/property/test_stories.py::test_every_story_keeps_its_promises"


@dataclass(frozen=True, slots=True)
class Planted:
    """One mistake: ``old`` occurs once in ``file`` and becomes ``new``; one of ``tests``, in their order, must fail
    with a message in which the regular expression ``says`` is found."""

    kind: str
    name: str
    file: str
    old: str
    new: str
    says: str
    tests: tuple[str, ...] = (STORIES,)

    @property
    def native(self) -> bool:
        return self.file.startswith("csrc/")

    @property
    def in_vllm(self) -> bool:
        """Whether its tests run inside vLLM, which is in an environment of its own."""
        return self.file.startswith("kvtier/connectors/vllm/")
