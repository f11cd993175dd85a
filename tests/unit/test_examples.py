"""What the README and the examples show runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
