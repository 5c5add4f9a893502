"""The command line: a command is a public function, its flags are its arguments and options."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Dict

import shoal
from shoal.api.result import Result
from shoal.cli.flags import command
from shoal.errors import InputError, check_names

START, DATA, RESEARCH = (
    Group(title, sort_key=n) for n, title in enumerate(("Start here", "Your data", "Research"))
)
GENERAL = Group("General", sort_key=99)
CODES = """Exit codes: 0 success, 1 a run failed or a check reported a problem, 2 invalid input, 130 and 143 \
interrupted. Runs are saved: the same command resumes."""
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""In the words of torch, which raises a RuntimeError."""


def make_app() -> App:
    """The commands, of which none imports torch before it is run."""
    from shoal.api.compare import compare
    from shoal.api.data import check, example, get
    from shoal.api.diagnose import diagnose
    from shoal.api.export import export
    from shoal.api.listing import listing
    from shoal.api.predict import predict
    from shoal.api.report import report
    from shoal.api.score import score
    from shoal.api.sweep import sweep
    from shoal.api.train import train
    from shoal.paper.demo import demo
    from shoal.paper.reproduce import reproduce

    app = App(
        name="shoal",
        help=shoal.__doc__,
        help_epilogue=CODES,
        version=shoal.__version__,
        help_format="plaintext",
        default_parameter=Parameter(negative_iterable=(), negative_none=(), consume_multiple=True),
        group_commands=GENERAL,
    )
    about = "Check a table or image folder, write example data, download datasets."
    data = App(name="data", help=about, group=START, sort_key=2)
    table = ("label", "domain", "held_out")
    commands: list[tuple[App, Group | None, str, Callable[..., Any], Sequence[str]]] = [
        (app, START, "demo", demo, ()),
        (app, START, "list", listing, ()),
        (data, None, "check", check, ("label", "domain")),
        (data, None, "get", get, ()),
        (data, None, "example", example, ()),
        (app, DATA, "diagnose", diagnose, ("label", "domain", "group", "out")),
        (app, DATA, "compare", compare, (*table, "algorithms", "budget", "out")),
        (app, DATA, "train", train, (*table, "steps", "out")),
        (app, DATA, "predict", predict, ("out", "proba")),
        (app, DATA, "score", score, ()),
        (app, DATA, "export", export, ()),
        (app, RESEARCH, "sweep", sweep, ("algorithms", "seeds", "search", "steps", "out")),
        (app, RESEARCH, "report", report, ()),
        (app, RESEARCH, "reproduce", reproduce, ("quick", "datasets", "seeds", "data_dir", "out")),
    ]
    app.command(data)
    for place, (parent, group, name, function, first) in enumerate(commands):
        parent.command(command(function, name, first), name=name, group=group, sort_key=place)
    app.register_install_completion_command()
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    app = make_app()
    app.meta.suppress_keyboard_interrupt = False  # it would exit without our message and code

    @app.meta.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        as_json: Annotated[bool, Parameter("--json", group=GENERAL, negative="", show_default=False)] = False,
        config: Annotated[Path | None, Parameter(group=GENERAL)] = None,
    ) -> int:
        """Run a command.

        Parameters
        ----------
        as_json:
            Print the result as JSON.
        config:
            YAML file with options of the command; those on the command line take precedence.
        """
        rare = _read_config(app, tokens, config) if config is not None else {}
        function, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        return _show(function(*bound.args, **{**rare, **bound.kwargs}), as_json)

    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):  # what their encoding lacks is written as an escape
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        code = _guarded(
            lambda: app.meta(words, exit_on_error=False, print_error=False, result_action="return_value")
        )
    if code and (processes := sys.modules.get("shoal.training.processes")):
        processes.abandon()  # a process that fails does not wait for the others
    return code


def _read_config(app: App, tokens: Sequence[str], path: Path) -> dict[str, Any]:
    """Has the flags in a YAML file read by ``app``; returns the options in it that have no flag."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{str(path)!r} cannot be read: {why}", "config") from None
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} must contain options, one per line as NAME: VALUE.", "config")
    function: Any = app.parse_commands(tokens)[1][-1].default_command
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    try:
        check_names("option", options, getattr(function, "kinds", ()))
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", "config") from None
    flags = inspect.signature(function).parameters
    app.config = Dict(
        {name: value for name, value in options.items() if name in flags},
        use_commands_as_keys=False,
        source=str(path),
    )
    return {name: value for name, value in options.items() if name not in flags}


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr, flush=True)


def _show(result: Any, as_json: bool) -> int:
    """Show the result of a command; returns the exit code."""
    if not isinstance(result, Result):  # what the library itself does, such as --help
        return 0
    if main_process():
        text = json.dumps(result.to_dict(), indent=1, default=str) if as_json else str(result)
        print(text, flush=True)
    return int(bool(result.problems))


def main_process() -> bool:
    """Whether this is the only process of a training, or the first."""
    return os.environ.get("RANK", "0") == "0"


def _guarded(run: Callable[[], Any]) -> int:
    """The exit code of ``run``; what went wrong is one message on stderr."""
    watched = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if watched else None  # it too leaves nothing half done
    try:
        code = run()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as error:
        return _failed(error.as_flag(), 2)
    except CycloptsError as error:
        return _failed(str(error), 2)
    except KeyboardInterrupt as stop:
        message = str(stop) or "interrupted. Finished runs are saved; the same command resumes."
        return _failed(message, 128 + (getattr(stop, "signal", None) or signal.SIGINT))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at exit
        return 0
    except OSError as error:  # a full disk, a folder without permission, a server that does not answer
        where = f"{error.filename!r}: " if error.filename else ""
        return _failed(f"{where}{error.strerror or error}.", 1)
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
            return _failed(f"out of memory ({text[:200]}); use smaller batches.", 1)
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class _Terminated(KeyboardInterrupt):
    signal = signal.SIGTERM


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _failed(message: str, code: int) -> int:
    if main_process():
        print(f"shoal: {message}", file=sys.stderr)
    return code
