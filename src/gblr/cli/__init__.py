"""The command line: `gblr compress | train | inspect | report | bench | export | reproduce`. No logic of its own."""

import sys

import typer
from rich.console import Console

from gblr.cli import commands, show
from gblr.cli.app import app

__all__ = ["app", "main"]
_EXPECTED = (ValueError, OSError, RuntimeError, ImportError, TypeError, FloatingPointError)


def main() -> None:
    """Errors become one line and exit code 1; wrong usage exits with 2; --debug shows where an error comes from."""
    commands.register()
    errors = Console(stderr=True, highlight=False)
    try:
        app(standalone_mode=False)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except typer.Abort:
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("stopped. Run the same command again to continue.")
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own, for wrong usage
            show.usage_error(errors, error)
            sys.exit(error.exit_code)
        if "--debug" in sys.argv or not isinstance(error, _EXPECTED):
            raise
        errors.print(f"[bold]error:[/] {show.plain(error)}", soft_wrap=True)
        sys.exit(1)
