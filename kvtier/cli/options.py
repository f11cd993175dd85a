"""Options that several commands share."""

import os
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


def check_file(name: str, path: Path) -> None:
    """ValueError where a file of that name could not be written: said before a measurement and not after it."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{name}: {str(path)!r} is a directory; expected a file to write")
    if not folder.is_dir():
        raise ValueError(f"{name}: {str(folder)!r} is no directory; expected a file to write in one that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}: {str(folder)!r} cannot be written; choose another directory")


def check_folder(name: str, path: Path) -> None:
    """The same for a folder, which is made if need be."""
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ValueError(f"{name}: {str(nearest)!r} is a file; expected a folder, which is made if need be")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{name}: {str(path)!r} cannot be made or written in {str(nearest)!r}; choose another")
