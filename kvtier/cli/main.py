"""The entry point: turns faults into one clear line and an exit code, and does nothing else.

Exit codes: 0 done; 1 a fault of the machine (a full disk, a missing permission); 2 bad input; 130 interrupted.
"""

import sys
from collections.abc import Sequence

DONE, FAULT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` unless given) and returns the exit code."""
    try:
        from kvtier.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvtier"):
            raise
        return say(
            f"{error.name} is not installed; the command line needs: pip install '.[cli]' in kvtier's source", BAD_INPUT
        )
    try:
        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return say("interrupted", INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvtier"):
            raise
        return say(
            f"{error.name} is not installed; this command needs: pip install '.[lab]' in kvtier's source", BAD_INPUT
        )
    except ValueError as error:  # ConfigError is one
        return say(str(error), BAD_INPUT)
    except OSError as error:
        words = error.strerror or str(error)
        return say(f"{error.filename}: {words}" if error.filename else words, FAULT)


def say(text: str, code: int) -> int:
    """Each line of `text` to standard error; returns `code`."""
    for line in text.splitlines() or ["failed without a reason"]:
        print(f"kvtier: {line}", file=sys.stderr)
    return code
