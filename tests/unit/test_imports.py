"""Who may import whom: design's order, downward only. A module that is in no room fails: give it one here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the top down. A room may import the rooms below its line and, where it is a line of peers, none of its own line.
LINES: list[list[str]] = [
    ["__main__"],
    ["cli"],
    ["lab", "connectors"],
    ["manager", "offload", "keyed"],
    ["decoding", "ranges"],
    ["loading", "foreign_loads", "foreign_waits", "prefetch"],
    ["gathering", "holdings"],
    ["hints"],
    ["plane", "relay", "stats", "lookup", "policy", "tail"],
    ["probe", "requests"],
    ["placement", "sequence", "foreign"],
    ["choice", "profile", "ways"],
    ["orders"],
    ["catalog", "costmodel", "mover", "journal"],
    ["tiers.copy_paths"],
    ["tiers.copy_ends"],
    ["tiers.device", "tiers.host", "tiers.disk", "tiers.remote"],
    ["tiers.cuda"],
    ["tiers"],
    ["messages", "fit", "layers", "waiting"],
    ["geometry", "namespace", "content", "config", "budget", "arguments"],
    ["enums"],
    ["_core", ""],  # "" is kvtier/__init__.py, which imports by name only
]
FRIENDS = {"geometry", "namespace", "content", "config", "budget", "arguments"}  # may know each other
FORBIDDEN = {"sim": {"tiers", "tiers.device", "tiers.host", "tiers.disk", "mover", "cli", "lab", "connectors"}}

INCLUDES = {
    "common": {"common"},
    "content": {"common", "content"},
    "costs": {"common", "costs"},
    "catalog": {"common", "catalog"},
    "copy": {"common", "copy"},
    "io": {"common", "io"},
    "mover": {"common", "copy", "io", "mover"},
    "orders": {"catalog", "common", "costs", "mover", "orders"},
    "requests": {"catalog", "common", "content", "requests"},
    "cuda": {"common", "copy", "cuda", "mover"},  # of the mover its words for a device, no more
}
SYSTEM_FORBIDDEN = {  # no I/O, no CUDA, no Python types in the catalog; no Python anywhere below the bindings
    "catalog": r"nanobind|Python\.h|cuda|fstream|iostream|fcntl|unistd|sys/|linux/|thread|mutex",
    "content": r"nanobind|Python\.h|cuda",
    "costs": r"nanobind|Python\.h|cuda",
    "copy": r"nanobind|Python\.h",
    "io": r"nanobind|Python\.h|cuda",
    "mover": r"nanobind|Python\.h|cuda",
    "orders": r"nanobind|Python\.h|cuda",
    "requests": r"nanobind|Python\.h|cuda",
    "cuda": r"nanobind|Python\.h|cuda\.h|cuda_runtime|io/",  # built without a toolkit
    "common": r"nanobind|Python\.h|cuda",
}


def _room(module: str) -> str | None:
    """The room of `kvtier.<module>`: the longest name in LINES or FORBIDDEN that holds it."""
    known = {room for line in LINES for room in line} | set(FORBIDDEN)
    parts = module.split(".") if module else [""]
    while parts:
        if ".".join(parts) in known:
            return ".".join(parts)
        parts.pop()
    return None


def _imports(path: Path, module: str) -> set[str]:
    """Names below `kvtier` that the file imports, wherever in it, type checking included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["kvtier", *package.split(".")][: (len(package.split(".")) if package else 0) + 2 - node.level]
                base = ".".join([*filter(None, above), *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            if name == "kvtier" or name.startswith("kvtier."):
                found.add(name.removeprefix("kvtier").removeprefix("."))
    return found


def _modules() -> list[tuple[str, Path]]:
    folder = ROOT / "kvtier"
    modules = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        modules.append((".".join(part for part in parts if part != "__init__"), path))
    return modules


def _faults(module: str, imported: set[str]) -> list[str]:
    room = _room(module)
    line = next((i for i, rooms in enumerate(LINES) if room in rooms), None)
    faults = []
    for name in sorted(imported):
        other = _room(name)
        if other is None:
            faults.append(f"kvtier.{module} imports kvtier.{name}, which is in no room")
        elif room in FORBIDDEN:
            if other in FORBIDDEN[room]:
                faults.append(f"kvtier.{module} imports kvtier.{name}: {room} may not know {other}")
        elif room and line is not None and room != other and not (room in FRIENDS and other in FRIENDS):
            lower = next((i for i, rooms in enumerate(LINES) if other in rooms), -1)
            if lower <= line:
                faults.append(f"kvtier.{module} imports kvtier.{name}: {room} is not above {other}")
    return faults


@pytest.mark.parametrize(("module", "path"), _modules(), ids=[name or "kvtier" for name, _ in _modules()])
def test_imports_run_downward_only(module: str, path: Path) -> None:
    assert _room(module) is not None, f"kvtier.{module} is in no room: give it one in {Path(__file__).name}"
    if module:
        assert not _faults(module, _imports(path, module))


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("tiers.host", "manager.CacheManager", False),
        ("tiers.host", "tiers.disk.DiskStore", False),
        ("tiers.host", "geometry.KVGeometry", True),
        ("catalog", "mover.Mover", False),
        ("config", "catalog", False),
        ("namespace", "config.ConfigError", True),
        ("manager", "lab.figures", False),
        ("cli.bench", "lab.figures", True),
        ("lab.engine", "connectors.vllm", False),
        ("sim.replay", "tiers.disk", False),
        ("sim.replay", "catalog.Catalog", True),
        ("manager", "nowhere", False),
    ],
)
def test_the_check_itself_sees_what_is_forbidden(module: str, imported: str, allowed: bool) -> None:
    assert (not _faults(module, {imported})) == allowed


def test_the_check_reads_relative_and_hidden_imports(tmp_path: Path) -> None:
    path = tmp_path / "host.py"
    path.write_text("from . import disk\nfrom ..manager import CacheManager\ndef f():\n    import kvtier.lab.figures\n")
    assert _imports(path, "tiers.host") == {"tiers.disk", "manager.CacheManager", "lab.figures"}


def _sources() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".hpp", ".h", ".cu"))


@pytest.mark.parametrize("path", _sources(), ids=[str(path.relative_to(ROOT)) for path in _sources()])
def test_native_rooms_include_only_what_is_below_them(path: Path) -> None:
    room = path.relative_to(ROOT / "csrc").parts[0]
    if room == "bindings":
        return
    for kind, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.M):
        if kind == '"':
            assert name.split("/")[0] in INCLUDES[room], f"csrc/{room} includes {name}"
        else:
            assert not re.search(SYSTEM_FORBIDDEN[room], name), f"csrc/{room} includes <{name}>"
