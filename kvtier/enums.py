"""Enumerations whose members are looked up as fast as any attribute.

Python 3.11 finds ``Tier.HOST`` by calling a descriptor written in Python, on every use; 3.12 and later do what is done
here.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

__all__ = ["direct"]

E = TypeVar("E", bound=type[Enum])


def direct(enumeration: E) -> E:
    """Keep the members of ``enumeration`` as its plain attributes; a class decorator."""
    for name, member in enumeration.__members__.items():
        type.__setattr__(enumeration, name, member)
    return enumeration
