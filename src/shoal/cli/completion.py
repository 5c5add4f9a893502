"""`shoal completion`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import Any

from shoal.cli.arguments import subcommands
from shoal.registry import ALGORITHMS, DATASETS, MODELS

BASH = """\
_shoal() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words=""
    case "$command ${{COMP_WORDS[2]}}" in
        {nested}) [[ $COMP_CWORD -gt 2 ]] && command="$command ${{COMP_WORDS[2]}}" ;;
    esac
    [[ $COMP_CWORD -eq 1 ]] && command=""
    case "$command $previous" in
{values}
    *) case "$command" in
{words}
    esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _shoal shoal
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Installation:\n"
        '  bash: add to ~/.bashrc: eval "$(shoal completion bash)"\n'
        '  zsh: add to ~/.zshrc: eval "$(shoal completion zsh)"\n'
        "  fish: shoal completion fish > ~/.config/fish/completions/shoal.fish"
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="shell")


def run(args: Any) -> None:
    from shoal.cli.showing import show

    script = fish() if args.shell == "fish" else bash()
    if args.shell == "zsh":
        script = f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{script}"
    show({"shell": args.shell, "script": script}, script.rstrip("\n"), args)


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command by name, those within others too."""
    from shoal.cli.app import COMMANDS, command_parser

    for name in COMMANDS:
        parser = command_parser(name)
        yield name, parser
        yield from ((f"{name} {inner}", each) for inner, each in subcommands(parser).items())


def bash() -> str:
    every = dict(parsers())
    outer = [name for name in every if " " not in name]
    words, values = [_case("", outer)], []
    for name, parser in every.items():
        words.append(_case(name, [*_words(parser), *subcommands(parser)]))
        for action in parser._actions:
            if action.option_strings and (choices := _choices(action)):
                flags = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
                values.append(f"    {flags}) words={shlex.quote(' '.join(choices))} ;;")
    nested = "|".join(f'"{name}"' for name in every if " " in name)
    return BASH.format(nested=nested, values="\n".join(values), words="\n".join(words))


def _case(name: str, words: list[str]) -> str:
    return f'    "{name}") words={shlex.quote(" ".join(words))} ;;'


def _choices(action: argparse.Action) -> list[str]:
    """What an argument may be, as far as it can be listed; DATA may be a file, which the shell completes."""
    if action.dest in ("algorithm", "algorithms"):
        return ALGORITHMS.names()
    if action.dest == "datasets" or (action.dest == "dataset" and action.option_strings):
        return DATASETS.names()
    if action.dest == "model" and action.option_strings:
        return MODELS.names()
    return [str(choice) for choice in action.choices or ()]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The options, and what is known of the positional arguments."""
    options = [flag for action in parser._actions for flag in action.option_strings if flag[:2] == "--"]
    return options + [
        choice
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        for choice in _choices(action)
    ]


def fish() -> str:
    lines = ["complete -c shoal -n __fish_use_subcommand -f"]
    for name, parser in parsers():
        outer, _, inner = name.rpartition(" ")
        asked = f"__fish_seen_subcommand_from {outer}" if outer else "__fish_use_subcommand"
        text = shlex.quote((parser.description or "").partition(". ")[0])
        lines.append(f"complete -c shoal -n {shlex.quote(asked)} -f -a {inner} -d {text}")
        condition = f"{asked}; and __fish_seen_subcommand_from {inner}" if outer else ""
        condition = shlex.quote(condition or f"__fish_seen_subcommand_from {name}")
        for action in parser._actions:
            choices = shlex.quote(" ".join(_choices(action)))
            if flags := [flag[2:] for flag in action.option_strings if flag[:2] == "--"]:
                takes = "" if action.nargs == 0 else f" -x -a {choices}" if _choices(action) else " -r"
                note = shlex.quote(re.sub(r"\s*\(default.*|(?<=%)%", "", str(action.help or ""))[:70])
                lines += [f"complete -c shoal -n {condition} -l {flag}{takes} -d {note}" for flag in flags]
            elif _choices(action) and not isinstance(action, argparse._SubParsersAction):
                files = " -f" if action.choices else ""  # none, unless other arguments are some
                lines.append(f"complete -c shoal -n {condition}{files} -a {choices}")
    return "\n".join(lines) + "\n"
