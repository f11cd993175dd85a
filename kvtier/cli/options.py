"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.config import CacheConfig, ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as host.size=64GiB.")
]

DIRECTORY: dict[str, Any] = {"exists": True, "file_okay": False, "writable": True}  # for an option that is one


def load_config(file: Path | None, settings: list[str] | None, **overrides: Any) -> CacheConfig:
    """File, environment, `--set`, then a command's own options, where they were given. Raises ConfigError."""
    values: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: expected KEY=VALUE, such as host.size=64GiB")
        values[key.strip()] = value
    values |= {key: value for key, value in overrides.items() if value is not None}
    return CacheConfig.load(file, **values)
