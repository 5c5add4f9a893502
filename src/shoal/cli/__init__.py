"""The command line, one file per command: what it does in a line, its arguments, and `run`."""

from shoal.cli.app import COMMANDS, main

__all__ = ["COMMANDS", "main"]
