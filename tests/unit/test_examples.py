"""What the README and the examples show runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvtier import CacheManager
from kvtier.catalog import Usage
from kvtier.stats import CacheStats

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "api.md"


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_sees_hits_from_every_tier(tmp_path):
    said = run([str(ROOT / "examples" / "embed.py")], tmp_path)
    for tier in ("device", "host", "disk"):
        assert f"{{'{tier}': 496}}" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
def test_the_readmes_code_runs(code, tmp_path):
    assert "496" in run(["-c", code], tmp_path)
    assert len(code.splitlines()) <= 24


def test_the_api_page_runs_from_top_to_bottom(tmp_path):
    pieces = re.findall(r"```python\n(.*?)```", API.read_text(), re.DOTALL)
    assert len(pieces) > 5
    run(["-c", "\n".join(pieces)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_api_page_names_every_call_and_every_number():
    calls = {name for name, value in vars(CacheManager).items() if callable(value) and not name.startswith("_")}
    numbers = {field.name for field in fields(CacheStats)} | set(Usage._fields)
    said = set(re.findall(r"`(\w+)", API.read_text()))
    said |= set(re.findall(r"cache\.(\w+)\(", API.read_text()))
    assert calls | numbers <= said
