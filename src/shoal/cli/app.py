"""The command line: parse, call, show. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import shoal
from shoal.cli.arguments import Parser
from shoal.cli.showing import main_process
from shoal.errors import InputError, shown
from shoal.terminal import printable

COMMANDS = {
    "demo": "shoal.paper.commands.demo",
    "train": "shoal.cli.train",
    "compare": "shoal.cli.compare",
    "track": "shoal.paper.commands.track",
    "diagnose": "shoal.cli.diagnose",
    "sweep": "shoal.cli.sweep",
    "resume": "shoal.cli.resume",
    "show": "shoal.cli.show",
    "evaluate": "shoal.cli.evaluate",
    "predict": "shoal.cli.predict",
    "score": "shoal.cli.score",
    "export": "shoal.cli.export",
    "results": "shoal.cli.results",
    "report": "shoal.cli.report",
    "list": "shoal.cli.list",
    "data": "shoal.cli.data",
    "reproduce": "shoal.paper.commands.reproduce",
}
"""Where each is; the paper's are found by name, so that nothing else imports its package."""


NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""In the words of torch, which raises a RuntimeError."""


LONGEST = 900
"""Characters of an error."""


class _Help(argparse.HelpFormatter):
    """Room for the longest option beside its explanation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)
        self._action_max_length = 14  # argparse does not count the names of commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; wrong input ends in one line on stderr and exit code 2, Ctrl-C in 130.

    A command may return an exit code of its own.
    """
    with printable():
        try:
            return _main(arguments)
        finally:
            _flush()


def _main(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    for text in words:
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
            return _failed(f"shoal: {shown(text)} holds characters that no name has; it must be UTF-8.", 2)
    parser = Parser(
        prog="shoal",
        description="Domain generalization: train models that work in places they have never seen.",
        epilog="Start with `shoal demo`. Each command has its own --help.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, where in COMMANDS.items():
        module = importlib.import_module(where)
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, formatter_class=_Help
        )
        command.set_defaults(run=module.run)
        if name in words[:1] or not COMMANDS.keys() & set(words[:1]):  # else another one is meant
            command.add_argument("--json", action="store_true", help="print JSON instead of tables")
            module.add_arguments(command)
    try:
        given = parser.parse_args(arguments)
    except InputError as error:
        return _failed(f"shoal: {error}", 2)
    if not hasattr(given, "run"):
        parser.print_help()
        return 0
    try:
        os.getcwd()
    except OSError:  # libraries that look into it would end the process in words of their own
        return _failed("shoal: the current folder is gone; change to another.", 2)
    before = _terminable()
    try:
        code: int | None = given.run(given)
        sys.stdout.flush()
    except InputError as error:
        return _failed(f"shoal: {error}", 2)
    except KeyboardInterrupt as stop:
        how = str(stop) or "stopped. Finished runs are kept; the same command resumes."
        return _failed(f"\nshoal: {how}", 128 + (getattr(stop, "signal", None) or signal.SIGINT))
    except BrokenPipeError:
        return 0
    except OSError as error:  # a full disk, a folder without permission, a server that does not answer
        where = f"{shown(error.filename)}: " if error.filename else ""
        return _failed(f"shoal: {where}{error.strerror or error}.", 1)
    except (MemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else ""
        if text.startswith("Could not determine home"):  # of ~nobody
            return _failed(f"shoal: {text} Write the path without ~.", 2)
        if isinstance(error, RuntimeError) and not any(words in text for words in NO_MEMORY):
            _abandon()
            raise
        return _failed(f"shoal: out of memory{f' ({text[:200]})' if text else ''}; use smaller batches.", 1)
    except BaseException:
        _abandon()
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return code or 0


def _flush() -> None:
    """What is left to print is printed now; where it cannot be, Python does not try again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                handle = os.open(os.devnull, os.O_WRONLY)
                os.dup2(handle, stream.fileno())
                os.close(handle)


def _failed(message: str, code: int) -> int:
    if len(message) > LONGEST:  # it quotes something that has no end
        message = f"{message[:LONGEST]}…"
    if main_process() and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(message, file=sys.stderr)
    _abandon()
    return code


def _abandon() -> None:
    """A process that fails does not wait for those it trained together with."""
    processes = sys.modules.get("shoal.training.processes")
    if processes is not None:
        processes.abandon()


class _Terminated(KeyboardInterrupt):
    signal = signal.SIGTERM


def _terminable() -> Any:
    """SIGTERM as an exception, so that it too leaves nothing half done; returns what it was before."""

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, stop)
