"""Profile: what ``kvtier calibrate`` measured on a machine, as a file; the cost model begins with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.config import ConfigError

if TYPE_CHECKING:
    from kvtier.costmodel import CostModel

__all__ = ["LaneSpeed", "PrefillSpeed", "Profile"]

_MOST_BYTES = 1 << 20  # of a file that can be a profile

_Seconds = Annotated[float, Field(ge=0.0, le=1e3)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class LaneSpeed(_Part):
    """A lane: ``fixed_s`` when it was idle, and bytes per second."""

    fixed_s: _Seconds
    bytes_per_s: float = Field(ge=1.0, le=1e15)


class PrefillSpeed(_Part):
    """Seconds per pass of the model, per token, and per token and token attended to."""

    pass_s: _Seconds
    token_s: _Seconds
    pair_s: _Seconds
    pass_tokens: int = Field(ge=1, le=1 << 24)
    model: str


class Profile(_Part):
    """Speeds of one machine. A later version adds fields and raises the number."""

    version: Literal["kvtier.profile/1"] = "kvtier.profile/1"
    date: str
    machine: str
    lanes: dict[Literal["offload", "onboard", "spill", "stage"], LaneSpeed]
    prefill: PrefillSpeed | None = None
    """None: no model was given; the engine's own timings will tell."""

    @classmethod
    def of(cls, costs: CostModel, *, date: str, machine: str, model: str | None = None) -> Self:
        """What ``costs`` has learnt."""
        speeds = {lane: costs.lane_speed(lane) for lane in ("offload", "onboard", "spill", "stage")}
        lanes = {lane: LaneSpeed(fixed_s=found[0], bytes_per_s=found[1]) for lane, found in speeds.items() if found}
        prefill, known = None, costs.prefill_speed()
        if known is not None and model is not None:
            (pass_s, token_s, pair_s), tokens = known
            prefill = PrefillSpeed(pass_s=pass_s, token_s=token_s, pair_s=pair_s, pass_tokens=tokens, model=model)
        return cls.model_validate({"date": date, "machine": machine, "lanes": lanes, "prefill": prefill})

    def seed(self, costs: CostModel) -> None:
        """Let ``costs`` begin with these speeds."""
        for lane, speed in self.lanes.items():
            costs.seed_lane(lane, speed.fixed_s, speed.bytes_per_s)
        known = self.prefill
        if known is not None:
            costs.seed_prefill((known.pass_s, known.token_s, known.pair_s), known.pass_tokens)

    def save(self, path: Path) -> None:
        """Write it as JSON, mode 0600, in one step. OSError where that cannot be."""
        work = path.with_name(f".{path.name}.part")
        try:
            with open(os.open(work, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=2) + "\n")
            work.replace(path)
        finally:
            work.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read :meth:`save`'s file. ConfigError of one line: no such file, too large, another version, a wrong one."""
        expected = "expected a file of `kvtier calibrate`"
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe may never end
                raise ConfigError(f"profile: {str(path)!r}: no regular file; {expected}")
            text = path.read_text(encoding="utf-8") if found.st_size <= _MOST_BYTES else ""
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigError(f"profile: {str(path)!r}: {reason}; {expected}") from None
        if found.st_size > _MOST_BYTES:
            raise ConfigError(f"profile: {str(path)!r}: {found.st_size} bytes; {expected}")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"])) or "profile"
            raise ConfigError(f"profile: {str(path)!r}: {where}: {fault['msg']}; {expected}") from None
