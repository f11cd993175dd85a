"""bench/gpu/check.sh, as far as it goes without a GPU: its own build is CMake's, and its steps run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = re.compile(r"^(-isystem|-o|-c|-I.*|/.*|CMakeFiles/.*|.*\.o)$")
MACHINE = {"-mtls-dialect=gnu2", "-Werror"}  # what CMake finds out or is told


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvtier_gpu_build", ROOT / "bench" / "gpu" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cmakes() -> Path:
    """A folder in which CMake built the module of this checkout."""
    for found in sorted((ROOT / "build").glob("*/compile_commands.json")):
        if "_core.dir" in found.read_text():
            return found.parent
    pytest.skip("CMake built nothing here")


def test_the_build_without_cmake_compiles_the_same_sources_in_the_same_way(build: ModuleType, cmakes: Path) -> None:
    wanted: dict[str, list[tuple[Path, set[str]]]] = {"engine": [], "bindings": [], "nanobind": []}
    kinds = {"kvtier_engine.dir": "engine", "_core.dir": "bindings", "nanobind-static.dir": "nanobind"}
    for entry in json.loads((cmakes / "compile_commands.json").read_text()):
        words = entry["command"].split()
        target = re.search(r"CMakeFiles/([^/]+)/", entry["command"])
        if target is not None and target[1] in kinds:
            flags = {word for word in words[1:] if not PLACES.match(word)} - MACHINE
            wanted[kinds[target[1]]].append((Path(entry["file"]), flags))
    found = build.sources()
    for kind, entries in wanted.items():
        if kind != "nanobind":  # of which it takes the one file that includes the others
            made = {path for path, _ in entries if path.name != "page_kernels.cpp"}
            assert set(found[kind]) == made, kind
        own = {word for word in build.FLAGS[kind].split() if not word.startswith("-I")}
        assert [flags for _, flags in entries if flags != own] == [], kind


def test_the_kernels_are_the_same_data_without_cmake(build: ModuleType, cmakes: Path) -> None:
    image = cmakes / "page_copy.fatbin"
    kernels = [ROOT / "csrc" / "cuda" / name for name in ("page_copy.cu", "page_args.hpp")]
    text = (cmakes / "page_kernels.cpp").read_text()
    assert text == build.embedded(*kernels, image if 'built_for() { return ""; }' not in text else None)


@pytest.mark.parametrize("step", ["small", "link", "ends", "disk"])
def test_a_step_runs_dry_and_says_that_its_figures_are_of_no_gpu(step: str, tmp_path: Path) -> None:
    environ = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu" / f"{step}.py"), "--dry-run"],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    if step != "small":
        result = json.loads((tmp_path / f"gpu-{step}.json").read_text())
        assert result["dry_run"]
        assert "no figure of this file says anything about a GPU" in result["device"]
        assert result["rows"]
