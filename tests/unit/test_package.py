"""The package: cheap to import, complete as a wheel, one version."""

import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "cupy", "matplotlib", "typer", "rich", "vllm")
CONTROL_PLANE = ("catalog", "placement", "costmodel", "prefetch", "manager", "mover", "config", "namespace", "geometry")


def python(code: str, **env: str) -> str:
    """What `code` prints in a fresh interpreter that sees this checkout."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | env
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_import_brings_no_extra_along_and_needs_no_compiler() -> None:
    code = f"import sys, kvtier; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(code, PATH="") == "[]"


@pytest.mark.parametrize("module", [name for name in CONTROL_PLANE if (ROOT / "kvtier" / f"{name}.py").exists()])
def test_control_plane_does_not_import_torch(module: str) -> None:
    assert python(f"import sys, kvtier.{module}; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_there() -> None:
    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None
    assert set(kvtier.__all__) <= set(dir(kvtier))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = kvtier.absent  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    text = (ROOT / "kvtier" / "__init__.py").read_text()
    assert set(re.findall(r"import \w+ as (\w+)", text)) == set(kvtier.__all__) - {"__version__"}


def test_pins_are_exact_and_name_no_registry() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), f"{path.name}: {line}"


def test_what_make_tells_the_tests_reaches_them_and_no_configuration_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTIER_TEST_WHEEL", "KVTIER_SEED", "KVTIER_HOST__SIZE"):
        monkeypatch.setenv(name, "1")
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))
    assert "KVTIER_TEST_WHEEL" in os.environ
    assert "KVTIER_SEED" in os.environ
    assert "KVTIER_HOST__SIZE" not in os.environ


@pytest.mark.skipif("KVTIER_TEST_WHEEL" not in os.environ, reason="compiles everything once more: `make wheel` runs it")
@pytest.mark.timeout(1800)
def test_wheel_holds_the_engine_its_types_and_nothing_of_the_workshop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--quiet"]
    built = subprocess.run(
        [*command, "--wheel-dir", tmp_path], capture_output=True, text=True, check=False, timeout=1700
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"kvtier-{kvtier.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    inside = {name for name in names if name.startswith("kvtier/")}
    assert {"kvtier/__init__.py", "kvtier/py.typed", "kvtier/_core.pyi"} <= inside
    assert len([name for name in inside if name.endswith(".so")]) == 1
    assert {name.split("/")[0] for name in names} == {"kvtier", f"kvtier-{kvtier.__version__}.dist-info"}
    code = "import kvtier._core as core; print(core.__file__)"
    path = os.pathsep.join([str(tmp_path / "site"), *[entry for entry in sys.path if entry and entry != str(ROOT)]])
    seen = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert str(tmp_path / "site") in seen.stdout.decode()
