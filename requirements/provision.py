"""Makes a developer's environment: a virtual environment with exactly the pinned packages, and `kvtier` on its path.

    python provision.py ENVIRONMENT [NAME]     the packages of requirements/NAME.txt, "dev" if not given, and torch

Run by `make setup` with any Python; says in one line what is missing when it cannot go on. Standard library only.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)

LAUNCHER = """#!{python}
import sys

from kvtier.cli.main import main

sys.exit(main())
"""


def fail(line):
    sys.exit("make setup: " + line)


def check_machine():
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        fail(f"{sys.executable} is Python {found}; kvtier needs 3.11 or later: make setup PYTHON=/path/to/python3.11")
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        fail("no C++ compiler found; install one that knows C++20 (g++ 11, clang 14 or later), or name it by CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        fail(
            f"{sys.executable} has no Python.h; install its development files (python3-dev), or name another by PYTHON"
        )


def pip(python, *arguments, quiet=False):
    """Whether `pip install` with these arguments worked."""
    command = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL if quiet else None).returncode == 0


def install(python, *arguments):
    if not pip(python, *arguments):
        fail("pip could not install the pinned packages (its message is above); nothing is marked as done, try again")


def torch_build(python):
    """(version, CUDA version or None) as torch/version.py says it, without importing a build that may not load."""
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    folder = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    text = (Path(folder) / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.M)
    return version.group(1) if version else "unknown", cuda.group(1) if cuda else None


def install_torch(python):
    gpu = shutil.which("nvidia-smi") is not None
    wanted = os.environ.get("TORCH") or (ROOT / "requirements" / "torch.txt").read_text().split("\n")[-2]
    # Without a GPU no dependencies: those that are missing then are CUDA's, and they are gigabytes. An index that has
    # CPU builds marks them; asking for the mark first costs nothing where there are none.
    marked = not gpu and "+" not in wanted and pip(python, "--no-deps", f"{wanted}+cpu", quiet=True)
    if not marked:
        install(python, *([] if gpu else ["--no-deps"]), wanted)
    version, cuda = torch_build(python)
    if cuda and not gpu:
        fail(
            f"torch {version} is a build for CUDA {cuda}, but there is no NVIDIA GPU, and pip's index has no build for "
            "the CPU; PyTorch's own index of CPU builds has: make setup PIP_EXTRA_INDEX_URL=<that index, as PyTorch's "
            "page on installing it says>"
        )
    print(
        f"torch {version}: {f'CUDA {cuda}' if cuda else 'CPU'} build; NVIDIA GPU: {'yes' if gpu else 'no'}", flush=True
    )
    if gpu and not cuda:
        print("the GPU will not be used: give a CUDA build of torch by TORCH=...")


def main():
    check_machine()
    environment = Path(sys.argv[1]).absolute()
    python = environment / "bin" / "python"
    if not python.exists():
        print(f"creating {environment} with {sys.executable} ({sys.version.split()[0]})", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", str(environment)], check=False).returncode:
            fail("python could not make a virtual environment (on Debian it needs python3-venv)")
    print("installing the pinned packages", flush=True)
    name = sys.argv[2] if len(sys.argv) > 2 else "dev"
    install(python, "--no-deps", "-r", str(ROOT / "requirements" / f"{name}.txt"))
    install_torch(python)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # A path entry and not an editable install: PYTHONPATH still wins over it, and the build stays CMake's alone.
    (Path(site) / "kvtier.pth").write_text(f"{ROOT}\n")
    launcher = environment / "bin" / "kvtier"
    launcher.write_text(LAUNCHER.format(python=python))
    launcher.chmod(0o755)


if __name__ == "__main__":
    main()
