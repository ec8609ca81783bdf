"""Loads the files that define commands; each hangs its own on the application."""

from gblr.cli import bench, compress, export, inspect, report, reproduce, version  # noqa: F401


def register() -> None:
    """Importing this module did it; the call keeps the import."""
