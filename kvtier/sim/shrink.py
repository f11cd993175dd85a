"""The shortest story that still goes wrong in the same way, by delta debugging over its steps (Zeller and Hildebrandt,
"Simplifying and isolating failure-inducing input", 2002)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvtier.sim.simulation import tell
from kvtier.sim.story import Story

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.sim.story import Step

__all__ = ["complaint", "shrink"]


def complaint(story: Story) -> str | None:
    """What goes wrong in a story, without the numbers in it; None when nothing does."""
    try:
        tell(story)
    except Exception as error:
        return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"
    return None


def shrink(story: Story, *, most_runs: int = 2000, complain: Callable[[Story], str | None] = complaint) -> Story:
    """Leave out steps as long as the complaint stays the same, at most ``most_runs`` runs long.

    Returns a story that complains as ``story`` does; ``story`` itself when that complains of nothing.
    """
    wanted = complain(story)
    if wanted is None:
        return story
    runs = 1

    def goes_wrong(steps: list[Step]) -> bool:
        nonlocal runs
        runs += 1
        return complain(Story(story.setup, steps, story.end)) == wanted

    steps, parts = story.steps, 2
    while len(steps) >= 2 and runs < most_runs:
        size = -(-len(steps) // parts)
        for first in range(0, len(steps), size):
            rest = steps[:first] + steps[first + size :]
            if goes_wrong(rest):
                steps, parts = rest, max(parts - 1, 2)
                break
            if runs >= most_runs:
                break
        else:
            if parts >= len(steps):
                break
            parts = min(2 * parts, len(steps))
    return Story(story.setup, steps, story.end)
