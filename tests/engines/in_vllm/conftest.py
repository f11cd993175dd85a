"""What the tests inside the real vLLM share: the model, engines in processes of their own, and what they answer without
a connector."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.in_vllm import models

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXTRA = {"host.size": "128MiB", "disk.size": "256MiB", "load_policy": "always"}  # what is faster is no test's matter


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return models.folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def run(model):
    """The results of an engine's steps; see engine.py for what may be asked."""

    def ask(extra, *steps, environment=None, **plan):
        plan = json.dumps(plan | {"model": str(model), "extra": extra, "steps": steps})
        path = os.pathsep.join([str(ROOT), str(ROOT / "bench/engines/vllm_arms"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(HERE / "engine.py"), plan],
            env=os.environ | {"PYTHONPATH": path} | (environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout)

    return ask


@pytest.fixture(scope="session")
def alone(run):
    """The tokens that prompts lead to without a connector, by number: 0 to 3, and 100 to 102 that repeat themselves."""
    asked = [0, 1, 2, 3, 100, 101, 102]
    results = run(None, *[["generate", n] for n in asked])
    return {n: result["tokens"] for n, result in zip(asked, results, strict=True)}


@pytest.fixture(scope="session")
def plain(alone):
    """Those of prompts 0 to 3."""
    return [alone[n] for n in range(4)]


@pytest.fixture(scope="session")
def first(run, tmp_path_factory):
    """An engine's first life: what it answered, and the folder of its disk tier with prompts 0 to 2 in it."""
    folder = tmp_path_factory.mktemp("kv")
    asked = [["generate", n] for n in (0, 1, 2, 0, 1, 2)]
    told = run(
        EXTRA | {"disk.path": str(folder)},
        *[*asked, ["quiet"], ["generate", 0, "tenant"], ["metrics"]],
        processes=True,
    )
    return told, folder


@pytest.fixture
def store(first, tmp_path):
    """The disk tier as the first engine left it, for one test to do with as it likes."""
    return shutil.copytree(first[1], tmp_path / "kv")
