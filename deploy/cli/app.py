"""Register the commands of ``driftpoint`` and turn every exception into one line and an exit code.

Slow imports (torch, the merger) are left to the commands that need them."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from deploy.cli import daemon, doctor, init, memory, merge, prune, report, show, simulate, status, verify
from deploy.cli import run as run_
from deploy.cli.import_checkpoint import import_
from deploy.console import ReaderLeftError, answer, note
from deploy.exit_codes import BROKEN_PIPE, EPILOG, INTERRUPTED, OK
from deploy.format import installed_version
from store.errors import DriftpointError, UsageError

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="driftpoint", epilog=EPILOG, add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP
)
for _command in (
    *(init.init, doctor.doctor, init.schema),  # need no store
    *(status.status, show.show, verify.verify, merge.merge, merge.export, prune.prune, memory.rescue),
    *(simulate.simulate, simulate.estimate, report.report),
):
    app.command(epilog=EPILOG)(_command)
app.command("import", epilog=EPILOG)(import_)
# Everything after the first word that is not an option belongs to the training command.
app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})(run_.run)
app.add_typer(daemon.app, name="daemon")
app.add_typer(memory.app, name="memory")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"driftpoint {installed_version() or '(not installed: running from source)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _driftpoint(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Adaptive checkpoints: run jobs, inspect, verify, rebuild and prune stores, and compare policies."""
    del version
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(UsageError.exit_code)


def main() -> None:
    """Run the command on ``sys.argv`` and exit with its code."""
    _fill_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding must not stop a command
    code = run(sys.argv[1:])
    if code == BROKEN_PIPE:
        # The interpreter flushes once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _fill_streams() -> None:
    """Open closed standard streams on /dev/null, so that no store file gets their descriptors and receives output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115


def run(args: Sequence[str]) -> int:
    """Run the command line on ``args`` and return the exit code. Raises nothing."""
    given = list(args)[: list(args).index("--")] if "--" in args else list(args)
    try:
        code = _run(list(args), as_json="--json" in given, debug="--debug" in given)
    except ReaderLeftError:
        return BROKEN_PIPE
    if code == INTERRUPTED:
        note("interrupted")
    return code


def _run(args: list[str], *, as_json: bool, debug: bool) -> int:
    try:
        result = app(args=args, prog_name="driftpoint", standalone_mode=False)
    except ReaderLeftError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the process's edge: everything becomes a line and a code
        if debug:
            traceback.print_exc()
        return _failed(error, as_json=as_json)
    return result if isinstance(result, int) else OK


def _failed(error: Exception, *, as_json: bool) -> int:
    if isinstance(error, DriftpointError):
        kind, message, code = type(error).__name__, str(error), error.exit_code
    elif (usage_message := getattr(error, "format_message", None)) is not None:  # a wrong usage, as typer tells it
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "driftpoint"
        message = f"{usage_message().rstrip('.')}; see `{command} --help`"
        kind, code = UsageError.__name__, getattr(error, "exit_code", UsageError.exit_code)
    else:
        kind, code = type(error).__name__, DriftpointError.exit_code
        message = f"internal {kind}: {error} (run it again with --debug to see the traceback)"
    message = " ".join(message.split())
    if as_json:
        answer({"error": {"type": kind, "message": message}}, lambda _: None, as_json=True)
    else:
        note(f"error: {message}")
    return code
