"""`make setup`: where its torch comes from."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "provision.py"


@pytest.fixture
def provision(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("provision", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("TORCH", raising=False)
    return module


def _indexes(module: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: bool, has) -> list[str]:
    """What pip was asked for, one after the other, where ``has`` says whether it is there; and torch's last build."""
    asked: list[str] = []

    def pip(python: str, *arguments: str, quiet: bool = False) -> bool:
        asked.append(arguments[-1].partition("==")[2])
        return has(asked[-1])

    monkeypatch.setattr(module, "pip", pip)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpu else None)
    monkeypatch.setattr(
        module, "torch_build", lambda python: ("2", None) if "+cpu" in asked[-1] else ("2+cu130", "13.0")
    )
    module.install_torch("python")
    return asked


def test_without_a_gpu_torch_is_the_cpu_build_where_an_index_marks_it(provision, monkeypatch) -> None:
    pinned = SCRIPT.with_name("torch.txt").read_text().split("==")[1].strip()
    asked = _indexes(provision, monkeypatch, False, lambda what: "+cpu" in what)
    assert asked == [f"{pinned}+cpu"]
    assert _indexes(provision, monkeypatch, True, lambda what: True) == [pinned]


def test_a_cuda_build_without_a_gpu_is_refused_with_what_to_do(provision, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="PIP_EXTRA_INDEX_URL=") as refused:
        _indexes(provision, monkeypatch, False, lambda what: "+cpu" not in what)
    assert len(str(refused.value).splitlines()) == 1
