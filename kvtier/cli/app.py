"""The commands. Each module of this package adds its own; what they have in common is here."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import kvtier
from kvtier.cli import bench, calibrate, calibrate_copies, doctor
from kvtier.cli.main import BAD_INPUT, DONE, INTERRUPTED, say

app = typer.Typer(
    name="kvtier",
    help="A KV-cache tiering engine: measure it, plan it, look at it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.command)
app.command("calibrate")(calibrate.command)
app.command("calibrate-copies")(calibrate_copies.command)

# Every release of typer has this class among the bases of BadParameter, but not always in the same module.
_UsageFault: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {kvtier.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Measure it, plan it, look at it."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command; usage faults end as one line, everything else is `main`'s."""
    command = typer.main.get_command(app)
    try:
        code: Any = command.main(args=list(arguments), prog_name="kvtier", standalone_mode=False)
    except _UsageFault as fault:
        return _usage(fault)
    except typer.Abort:
        return say("interrupted", INTERRUPTED)
    if code == INTERRUPTED:  # some releases of typer turn Ctrl-C into this code, others into Abort
        return say("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else DONE


def _usage(fault: Exception) -> int:
    message: str = fault.format_message()  # type: ignore[attr-defined]
    if type(fault).__name__ == "NoArgsIsHelpError":  # no fault at all; with rich the help is on the screen already
        if message.strip():
            print(message)
        return DONE
    context = getattr(fault, "ctx", None)
    where = f" ({context.command_path} --help says more)" if context is not None else ""
    return say(" ".join(message.split()) + where, BAD_INPUT)
