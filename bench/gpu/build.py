"""Builds the native engine by ninja alone, where there are nanobind and a C++ compiler but no CMake.

The same sources and options as CMakeLists.txt has, and the same result: ``kvtier/_core*.so`` beside the Python files,
with the kernels' machine code where nvcc is. ``tests/unit/test_gpu_check.py`` compares the two.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "kvtier" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
ENGINE = sorted(folder.name for folder in (ROOT / "csrc").iterdir() if folder.name != "bindings")
COMMON = "-O3 -DNDEBUG -fPIC -fvisibility=hidden -std=c++20"
FLAGS = {
    "engine": f"-I{ROOT}/csrc {COMMON} -fvisibility-inlines-hidden -Wall -Wextra",
    "bindings": f"-D_core_EXPORTS -I{ROOT}/csrc {COMMON} -Wall -Wextra -fno-stack-protector -Os -ffunction-sections "
    "-fdata-sections",
    "nanobind": f"-DNB_BUILD -DNB_COMPACT_ASSERTIONS {COMMON} -fno-strict-aliasing -fno-stack-protector "
    "-ffunction-sections -fdata-sections",
}  # the last two: what nanobind's own CMake files give

RULES = """
rule compile
  command = {cxx} $flags -MD -MF $out.d -o $out -c $in
  description = compile $out
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared -Wl,-s -Wl,--gc-sections -o $out $in -ldl -pthread
  description = link $out
rule kernels
  command = {nvcc} -std=c++17 -O3 -I {root}/csrc -fatbin {targets} -o $out $in
  description = nvcc $out
rule embed
  command = {python} {root}/bench/gpu/build.py --embed $out $in
  description = embed $out
"""


def sources() -> dict[str, list[Path]]:
    """What is compiled, by the name of its flags, without the kernels' data."""
    found = {
        "engine": [path for folder in ENGINE for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))],
        "bindings": sorted((ROOT / "csrc" / "bindings").glob("*.cpp")),
    }
    return found | {"nanobind": [Path(nanobind.source_dir()) / "nb_combined.cpp"]}


def code() -> list[str]:
    """What nvcc compiles the kernels for."""
    text = (ROOT / "cmake" / "page_kernels.cmake").read_text()
    return re.search(r'KVTIER_CUDA_CODE "([^"]*)"', text)[1].split(";")  # type: ignore[index]


def find_nvcc() -> str | None:
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(f"{place}/bin" for place in places))


def embedded(source: Path, header: Path, image: Path | None) -> str:
    """C++ that holds the kernels' source and machine code as data."""
    text = (ROOT / "cmake" / "page_kernels.cpp.in").read_text()
    for name, path in {"SOURCE": source, "HEADER": header, "IMAGE": image}.items():
        text = text.replace(f"@{name}@", "".join(f"0x{byte:02x}," for byte in path.read_bytes()) if path else "")
    return text.replace("@BUILT_FOR@", " ".join(code()) if image else "")


def ninja_file(build: Path, nvcc: str | None) -> str:
    """The rules and, for each file that is made, how."""
    nano = Path(nanobind.include_dir())
    include = f"-I{sysconfig.get_path('include')} -I{nano} -isystem {nano.parent}/ext/robin_map/include"
    targets = " ".join(f"-gencode=arch=compute_{target.partition('_')[2]},code={target}" for target in code())
    cxx = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "clang++"
    lines = [RULES.format(cxx=cxx, nvcc=nvcc, root=ROOT, targets=targets, python=sys.executable)]
    kernels = [ROOT / "csrc" / "cuda" / name for name in ("page_copy.cu", "page_args.hpp")]
    image = [build / "page_copy.fatbin"] if nvcc else []
    if image:
        lines.append(f"build {image[0]}: kernels {kernels[0]} | {kernels[1]}")
    template = ROOT / "cmake" / "page_kernels.cpp.in"
    data = build / "page_kernels.cpp"
    lines.append(f"build {data}: embed {' '.join(map(str, kernels + image))} | {template}")
    objects = []
    for kind, paths in sources().items():
        for path in [*paths, data] if kind == "engine" else paths:
            objects.append(build / kind / f"{path.parent.name}-{path.stem}.o")
            lines.append(f"build {objects[-1]}: compile {path}")
            lines.append(f"  flags = {FLAGS[kind]}{'' if kind == 'engine' else ' ' + include}")
    lines.append(f"build {MODULE}: link {' '.join(map(str, objects))}\n")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", help="where to; default: %(default)s")
    parser.add_argument("--embed", nargs="+", type=Path, metavar="FILE", help="made file, source, header, image")
    given = parser.parse_args()
    if given.embed:
        made, source, header, *image = given.embed
        made.write_text(embedded(source, header, image[0] if image else None))
        return 0
    nvcc = find_nvcc()
    given.build.mkdir(parents=True, exist_ok=True)
    (given.build / "build.ninja").write_text(ninja_file(given.build.absolute(), nvcc))
    ninja = [shutil.which("ninja")] if shutil.which("ninja") else [sys.executable, "-m", "ninja"]
    made = subprocess.run([*ninja, "-C", str(given.build)], check=False).returncode  # type: ignore[list-item]
    print(f"page kernels: {' '.join(code()) if nvcc else 'compiled when the GPU is first used (no nvcc)'}")
    return made


if __name__ == "__main__":
    sys.exit(main())
