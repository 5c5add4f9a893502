"""The command line: parse, call, show. Only the module of the command that was asked for is imported."""

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
from shoal.cli.arguments import Parser, add_common, as_options, with_config
from shoal.cli.showing import main_process
from shoal.errors import LONGEST_MESSAGE, InputError, shown, unknown_name
from shoal.terminal import printable

GROUPS = {
    "Start here": {
        "demo": (
            "shoal.paper.commands.demo",
            "Run a small experiment of the paper: does a model learn colour or shape?",
        ),
        "list": ("shoal.cli.list", "List the algorithms or the datasets."),
        "data": ("shoal.cli.data", "Check a table or image folder; write example data; download datasets."),
    },
    "Your data": {
        "diagnose": ("shoal.cli.diagnose", "Test for shifts between domains before training."),
        "train": ("shoal.cli.train", "Train one algorithm on a dataset or on your own data."),
        "compare": ("shoal.cli.compare", "Compare algorithms on held-out domains and recommend one."),
        "predict": ("shoal.cli.predict", "Predict with a trained model on a table, images or text."),
        "score": ("shoal.cli.score", "Score a trained model on labelled data: metrics per domain and drift."),
        "export": ("shoal.cli.export", "Export a trained model to ONNX, torch.export or safetensors."),
    },
    "Runs": {
        "sweep": ("shoal.cli.sweep", "Compare algorithms on datasets with the protocol of DomainBed."),
        "soup": ("shoal.cli.soup", "Average the weights of several runs into one model."),
        "show": ("shoal.cli.show", "Show the progress or the result of a run."),
        "resume": ("shoal.cli.resume", "Resume an interrupted run."),
        "results": (
            "shoal.cli.results",
            "Query results: filter, sort, group and export the runs in a folder.",
        ),
        "report": ("shoal.cli.report", "Write an HTML report of runs: tables, curves, errors."),
        "evaluate": (
            "shoal.cli.evaluate",
            "Score prediction files in the format of the WILDS leaderboard.",
        ),
        "completion": ("shoal.cli.completion", "Print a completion script for bash, zsh or fish."),
    },
    "The paper": {
        "reproduce": ("shoal.paper.commands.reproduce", "Reproduce an experiment of the paper."),
        "track": (
            "shoal.paper.commands.track",
            "Measure the gradient agreement of Fish and ERM during training.",
        ),
    },
}
"""The module and the summary of every command; the paper's are named, so that nothing imports its package."""
COMMANDS = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}

CODES = {
    0: "success",
    1: "a run failed, or a check reported a problem",
    2: "invalid input",
    130: "interrupted by Ctrl-C",
    143: "terminated by SIGTERM",
}

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""In the words of torch, which raises a RuntimeError."""


class _Help(argparse.HelpFormatter):
    """Help in two columns; in descriptions and epilogs, lines are kept and indented ones not wrapped."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(
            x if x[:1] == " " else super(_Help, self)._fill_text(x, width, indent) for x in lines
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code, one of :data:`CODES`."""
    with printable():
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            _flush()


def command_parser(name: str) -> Parser:
    """The parser of one command, with what all commands take."""
    module = importlib.import_module(COMMANDS[name])
    summary = next(group[name][1] for group in GROUPS.values() if name in group)
    parser = Parser(prog=f"shoal {name}", description=summary, formatter_class=_Help)
    add_common(parser)
    parser.set_defaults(run=module.run, json=False)
    module.add_arguments(parser)
    return parser


def program() -> Parser:
    """One parser with those of all commands: for tests and documentation, which need them all."""
    parser = Parser(prog="shoal", description=shoal.__doc__)
    commands = parser.add_subparsers(metavar="COMMAND").choices
    for name in COMMANDS:
        commands[name] = command_parser(name)
    return parser


def help_text() -> str:
    """What ``shoal --help`` prints."""
    lines = ["usage: shoal COMMAND [options]", "", shoal.__doc__ or ""]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12}{summary}" for name, (_, summary) in group.items())]
    lines += ["", "Exit codes:", *(f"  {code:<12}{meaning}" for code, meaning in CODES.items())]
    return "\n".join(
        [*lines, "", "See `shoal COMMAND --help` for each command; `shoal --version` prints the version."]
    )


def _main(words: list[str]) -> int:
    for text in words:
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
            return _failed(
                f"shoal: {shown(text)} contains characters that are not valid in a name; it must be UTF-8.", 2
            )
    if not words or words[0] in ("-h", "--help", "--version"):
        try:
            print(f"shoal {shoal.__version__}" if words[:1] == ["--version"] else help_text(), flush=True)
        except BrokenPipeError:
            return 0
        except OSError as error:
            return _failed(f"shoal: {error.strerror}.", 1)
        return 0
    try:
        if words[0] not in COMMANDS:
            raise unknown_name("argument" if words[0][:1] == "-" else "command", words[0], COMMANDS)
        parser = command_parser(words[0])
        args = parser.parse_args(with_config(parser, words[1:]))
        names = vars(args).keys() - {"run", "action"}
        os.getcwd()
    except InputError as error:
        return _failed(f"shoal: {error}", 2)
    except OSError:  # libraries that look into it would end the process in words of their own
        return _failed("shoal: the current folder no longer exists; change to another.", 2)
    before = _terminable()
    try:
        code: int | None = args.run(args)
        sys.stdout.flush()
    except InputError as error:
        return _failed(f"shoal: {as_options(str(error), names)}", 2)
    except KeyboardInterrupt as stop:
        how = str(stop) or "interrupted. Finished runs are saved; the same command resumes."
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
    if len(message) > LONGEST_MESSAGE:  # it quotes something that has no end
        message = f"{message[:LONGEST_MESSAGE]}…"
    if main_process() and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(message, file=sys.stderr)
    _abandon()
    return code


def _abandon() -> None:
    """A process that fails does not wait for the others of its process group."""
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
