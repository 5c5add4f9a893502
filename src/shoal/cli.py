"""The command line: parse, call, show. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shoal
from shoal.commands import demo, list, reproduce, train
from shoal.errors import InputError

COMMANDS = {"demo": demo, "train": train, "list": list, "reproduce": reproduce}


class _Help(argparse.HelpFormatter):
    """Room for the longest option beside its explanation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)
        self._action_max_length = 14  # argparse does not count the names of commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; wrong input ends in one line on stderr and exit code 2, Ctrl-C in 130."""
    parser = argparse.ArgumentParser(
        prog="shoal",
        description="Domain generalization: train models that work in places they have never seen.",
        epilog="Start with `shoal demo`. Each command has its own --help.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, formatter_class=_Help
        )
        command.set_defaults(run=module.run)
        command.add_argument("--json", action="store_true", help="print JSON for machines instead of tables")
        module.add_arguments(command)
    given = parser.parse_args(arguments)
    if not hasattr(given, "run"):
        parser.print_help()
        return 0
    try:
        given.run(given)
    except InputError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nshoal: stopped. Finished runs are kept; the same command goes on from there.", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        return 0
    return 0
