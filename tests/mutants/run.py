"""Plants each mistake of tests/mutants/planted.py in a copy of this tree, builds what it touches, runs the tests that
must find it, and prints what they say.
Usage: python -m tests.mutants.run [PART OF A NAME ...] [--keep FOLDER] [--vllm PYTHON]

Ends with status 1 if a mistake survives or is found with a message that does not name it. A folder that is kept is
used again, with what was built in it. Mistakes in the connector are passed over without a Python that has vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.mutants.planted import PLANTED, Planted

TREE = Path(__file__).parents[2]
BUILD = "build/mutants"
LONGEST = 1800.0  # seconds for one test file; a mistake may well make a test hang


class Found(NamedTuple):
    """The first test that failed, and the first line of what it said."""

    test: str
    message: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("names", nargs="*", help="plant only those with one of these in their kind or name")
    parser.add_argument("--keep", type=Path, help="the folder of the copy; a temporary one if not given")
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM, as .venv-vllm/bin/python")
    args = parser.parse_args()
    named = [p for p in PLANTED if not args.names or any(name in f"{p.kind}: {p.name}" for name in args.names)]
    chosen = [p for p in named if args.vllm or not p.in_vllm]
    survived = 0
    with contextlib.ExitStack() as stack:
        copy = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        copy_tree(copy)
        stale = True  # what was built is of other sources
        for planted in chosen:
            with edited(copy / planted.file, planted):
                if planted.native or stale:
                    build(copy)
                stale = planted.native
                found = look_for(copy, planted, str(args.vllm) if planted.in_vllm else sys.executable)
            right = found is not None and re.search(planted.says, found.message) is not None
            survived += not right
            print(f"{'found   ' if right else 'MISNAMED' if found else 'SURVIVED'}  {planted.kind}: {planted.name}")
            print(f"          {found.test}: {found.message}" if found else f"          {', '.join(planted.tests)}")
            sys.stdout.flush()
    if len(chosen) < len(named):
        print(f"{len(named) - len(chosen)} mistakes passed over: their tests need a Python with vLLM (--vllm)")
    print(f"{len(chosen) - survived} of {len(chosen)} mistakes were found and named")
    return 1 if survived else 0


def copy_tree(copy: Path) -> None:
    """All that git knows or would know, as it is now. What has not changed keeps its time, so that builds are short."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=TREE, check=True, capture_output=True, text=True).stdout.split("\0"):
        source, target = TREE / name, copy / name
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def build(copy: Path) -> None:
    """The native engine; what it says is shown only if that fails."""
    configure = [
        "cmake",
        "-S",
        ".",
        "-B",
        BUILD,
        "-G",
        "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DKVTIER_WERROR=ON",
    ]
    for command in ([*configure, "--log-level=WARNING"], ["cmake", "--build", BUILD]):
        if command[1] == "-S" and (copy / BUILD / "build.ninja").is_file():
            continue
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def edited(file: Path, planted: Planted) -> Iterator[None]:
    text = file.read_text()
    if text.count(planted.old) != 1:
        raise SystemExit(f"{planted.name}: {planted.file} has its old text {text.count(planted.old)} times")
    file.write_text(text.replace(planted.old, planted.new))
    try:
        yield
    finally:
        file.write_text(text)


def look_for(copy: Path, planted: Planted, python: str) -> Found | None:
    """Run the tests until one fails; None: none does."""
    report = copy / "mutant.xml"
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    for tests in planted.tests:
        report.unlink(missing_ok=True)
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "--sim-shrink=0", f"--junitxml={report}"]
        command = [python, "-m", "pytest", *quiet, tests]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            return Found(tests, f"did not end within {LONGEST:.0f} s")
        if done.returncode < 0 or not report.is_file():
            return Found(tests, f"ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
        for case in ElementTree.parse(report).iter("testcase"):
            for kind in ("failure", "error"):
                if (failed := case.find(kind)) is not None:
                    lines = (failed.get("message") or failed.text or "").strip().splitlines()
                    return Found(case.get("name", tests), lines[0] if lines else "nothing")
    return None


if __name__ == "__main__":
    sys.exit(main())
