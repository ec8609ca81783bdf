"""The command line: `gblr compress | train | inspect | report | bench | export | reproduce`. No logic of its own."""

import sys

import typer
from rich.console import Console

from gblr.cli import commands, show
from gblr.cli.app import app

__all__ = ["app", "main"]
_INTERRUPTED = 130
_EXPECTED = (ValueError, OSError, RuntimeError, ImportError, TypeError, FloatingPointError)


def main() -> None:
    """Errors become one line and exit code 1; wrong usage exits with 2; --debug shows where an error comes from."""
    commands.register()
    errors = Console(stderr=True, highlight=False)
    try:
        code = app(prog_name="gblr", standalone_mode=False)  # typer turns Ctrl-C into exit code 130
    except typer.Exit as ended:
        code = ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own, for wrong usage
            show.usage_error(errors, error)
            sys.exit(error.exit_code)
        if "--debug" in sys.argv or not isinstance(error, _EXPECTED):
            raise
        errors.print(f"[bold]error:[/] {show.plain(error)}", soft_wrap=True)
        sys.exit(1)
    if code == _INTERRUPTED:
        errors.print("stopped. Run the same command again to continue.")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
