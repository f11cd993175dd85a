"""`kvtier doctor`: what would be built on this machine, and what keeps it from being faster."""

import json as json_module
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvtier
from kvtier.budget import HUGE_PAGE, allowance
from kvtier.cli.main import BAD_INPUT
from kvtier.cli.options import ConfigFile, Settings, load_config
from kvtier.config import CacheConfig, format_size, readable_size
from kvtier.content import label_bytes
from kvtier.geometry import KVGeometry

GOOD, NOTE, BAD = "good", "note", "bad"
_NEEDS_TORCH = (
    "`kvtier bench ttft`, `prefetch` and `overhead`, `calibrate --model`: pip install '.[lab]' in kvtier's source"
)
_INSTRUCTIONS = ("avx2", "avx512f", "sha_ni")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about this machine and what follows from it."""

    what: str
    found: str
    verdict: str = GOOD  # good; note: works, but slower or with less; bad: something asked for will not work
    advice: str = ""


def command(
    path: Annotated[Path | None, typer.Option("--path", help="A directory to probe as a disk tier.")] = None,
    geometry: Annotated[str, typer.Option(help="The model whose pages are reckoned with.")] = "llama-3-8b",
    config: ConfigFile = None,
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Say what kvtier would build here, and what holds it back; exit code 2 if what is asked for cannot be."""
    wanted = load_config(config, settings, **{"disk.path": path})
    findings = list(examine(wanted, KVGeometry.named(geometry, block_size=wanted.block_size), geometry))
    if json:
        for finding in findings:
            print(json_module.dumps(asdict(finding)))
    else:
        _print(findings)
    if any(finding.verdict == BAD for finding in findings):
        raise typer.Exit(BAD_INPUT)


def _print(findings: list[Finding]) -> None:
    table = Table("what", "found", "", "advice", title=f"kvtier {kvtier.__version__}", title_justify="left")
    colours = {GOOD: "green", NOTE: "yellow", BAD: "red"}
    for finding in findings:
        mark = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.what, escape(finding.found), mark, escape(finding.advice))
    Console().print(table)


def examine(config: CacheConfig, geometry: KVGeometry, model: str) -> Iterator[Finding]:
    """Everything that decides what a cache with this configuration is built from, and its tiers for ``model``'s pages,
    which are of ``geometry``."""
    yield _engine()
    yield _processor()
    yield _memory(config)
    yield _host_tier(config, geometry, model)
    yield _huge_pages()
    yield _locked_memory()
    disk = _disk(config)
    yield disk
    if config.disk.path is not None and disk.verdict != BAD:
        yield _disk_tier(config, geometry, model)
    yield _torch()
    yield _gpu()
    yield _nvcc()


def _engine() -> Finding:
    try:
        from kvtier import _core
    except ImportError as error:
        return Finding("native engine", str(error), BAD, "install a wheel, or build it: make build")
    return Finding("native engine", str(Path(_core.__file__ or "").name))


def _processor() -> Finding:
    flags = set()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            break
    found = [name for name in _INSTRUCTIONS if name in flags]
    text = f"{os.cpu_count()} cores, {', '.join(found) or 'none of ' + ', '.join(_INSTRUCTIONS)}"
    if "avx2" in flags:
        return Finding("processor", text)
    return Finding("processor", text, NOTE, "without AVX2 checksums are computed by plain code, several times slower")


def _memory(config: CacheConfig) -> Finding:
    allowed = allowance()
    text = f"{readable_size(allowed.bytes)} left of {allowed.limited_by}"
    if config.host.size > allowed.bytes:
        size = format_size(config.host.size)
        return Finding("memory", text, BAD, f"host.size of {size} does not fit; set a smaller one")
    return Finding("memory", f"{text}; host.size {format_size(config.host.size)} fits")


def _host_tier(config: CacheConfig, geometry: KVGeometry, model: str) -> Finding:
    slots = config.host.size // geometry.page_bytes
    return _tier("host", slots, config.host.size, config.host.write, geometry, model)


def _disk_tier(config: CacheConfig, geometry: KVGeometry, model: str) -> Finding:
    from kvtier.tiers.disk import slots_in

    slots = slots_in(config.disk.size, geometry.payload_bytes, label_bytes(geometry.block_size))
    return _tier("disk", slots, config.disk.size, config.disk.write, geometry, model)


def _tier(name: str, slots: int, size: int, write: str, geometry: KVGeometry, model: str) -> Finding:
    page = geometry.page_bytes
    if not slots:
        advice = f"{name}.size of {format_size(size)} holds no page of {readable_size(page)}; set a larger one"
        return Finding(f"{name} tier", "no pages", BAD, advice)
    tokens = slots * geometry.block_size
    text = f"{readable_size(slots * page)}, {slots:,} pages of {readable_size(page)}, {tokens:,} tokens of {model}"
    return Finding(f"{name} tier", f"{text}; write: {write}")


def _huge_pages() -> Finding:
    mode = next(iter(_lines("/sys/kernel/mm/transparent_hugepage/enabled")), "")
    chosen = mode.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", f"{format_size(HUGE_PAGE)}, {chosen}")
    advice = "copies are 10 to 40 % slower: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", chosen or "unknown", NOTE, advice)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding("locked memory", "no limit")
    advice = "buffers cannot be registered with the kernel beyond that: ulimit -l unlimited"
    return Finding("locked memory", format_size(soft), NOTE, advice)


def _disk(config: CacheConfig) -> Finding:
    if config.disk.path is None:
        return Finding("disk", "none configured", NOTE, "probe a directory: kvtier doctor --path DIR")
    from kvtier._core import probe_io

    path = str(config.disk.path)
    try:
        probe = probe_io(path)
    except (OSError, ValueError, RuntimeError) as error:
        return Finding("disk", path, BAD, " ".join(str(error).split()))
    free = shutil.disk_usage(path).free
    how = f"{'io_uring' if probe.uring else 'threads'}, {'direct' if probe.direct else 'buffered'}"
    text = f"{path}: {probe.filesystem}, {how}, {readable_size(free)} free"
    if config.disk.size > free + _store_bytes(Path(path)):
        return Finding("disk", text, BAD, f"disk.size of {format_size(config.disk.size)} does not fit")
    return Finding("disk", text, GOOD if probe.uring and probe.direct else NOTE, probe.why)


def _store_bytes(folder: Path) -> int:
    """What a store that was made in ``folder`` before has set aside already."""
    try:
        return (folder / "slab").stat().st_blocks * 512
    except OSError:
        return 0


def _torch() -> Finding:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return Finding("torch", "not installed", NOTE, _NEEDS_TORCH)
    # Read, not imported: importing takes seconds, and a build for another machine may not load.
    lines = _lines(str(Path(next(iter(spec.submodule_search_locations))) / "version.py"))
    cuda = next((line.split("=", 1)[1].strip(" '\"") for line in lines if line.startswith("cuda")), "None")
    try:
        release = version("torch")
    except PackageNotFoundError:
        release = "unknown version"
    return Finding("torch", f"{release}, {'CPU build' if cuda == 'None' else f'CUDA {cuda}'}")


def _gpu() -> Finding:
    driver = next(iter(_lines("/proc/driver/nvidia/version")), "")
    if driver:
        found = " ".join(driver.split(":", 1)[-1].split())
        note, built_for = _cuda()
        if note:
            return Finding("NVIDIA driver", found, NOTE, f"{note}; the device tier is host memory here")
        compiled = f"page kernels built for {built_for}" if built_for else "page kernels compiled when first used"
        return Finding("NVIDIA driver", f"{found}; {compiled}")
    return Finding("NVIDIA driver", "none", NOTE, "the device tier is host memory here, and reports say so")


def _cuda() -> tuple[str, str]:
    """Why no device can be used, and what the page kernels were built for; either may be empty."""
    try:
        from kvtier._core import cuda_status
    except ImportError:
        return "", ""
    status = cuda_status()
    return status["note"], status["built_for"]


def _nvcc() -> Finding:
    nvcc = shutil.which("nvcc")
    return Finding("nvcc", nvcc or "none", GOOD if nvcc else NOTE, "" if nvcc else "not needed to build or to run")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
