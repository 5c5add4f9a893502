"""The reference of the command line, made from the parsers that read it."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator

from shoal.cli.app import help_text, program
from shoal.cli.arguments import subcommands as commands

TITLES = {"positional arguments": "Arguments", "options": "Options"}


def page() -> str:
    """All commands in Markdown."""
    parser = program()
    lines = ["# Command line", "", text(parser.description), "", "```text", help_text(), "```", ""]
    for name, command in commands(parser).items():
        lines += section(f"shoal {name}", command, 2)
    return "\n".join(lines)


def section(title: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """A command, what it takes, and the commands below it."""
    usage = parser.format_usage().removeprefix("usage: ").strip()
    yield from (f"{'#' * level} {title}", "", text(parser.description), "")
    yield from ("```text", re.sub(r"\n\s+", "\n    ", usage), "```", "")
    for group in parser._action_groups:
        yield from options(group, parser)
    yield from epilog(parser.epilog)
    for name, command in commands(parser).items():
        yield from section(f"{title} {name}", command, level + 1)


def options(group: argparse._ArgumentGroup, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A group of options as a list of definitions."""
    formatter = parser._get_formatter()
    actions = [
        action
        for action in group._group_actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction))
    ]
    if not actions:
        return
    title = group.title or ""
    yield from (f"**{TITLES.get(title, title[:1].upper() + title[1:])}**", "")
    if group.description:
        yield from (text(group.description), "")
    for action in actions:
        said = formatter._expand_help(action) if action.help else "–"
        yield from (f"`{formatter._format_action_invocation(action)}`", f":   {text(said)}", "")


def epilog(words: str | None) -> Iterator[str]:
    """Paragraphs, and indented lines as a block of code."""
    for indented, lines in itertools.groupby((words or "").splitlines(), lambda line: line[:1] == " "):
        if indented:
            yield from ("", "```text", *(line.strip() for line in lines), "```", "")
        else:
            yield from map(text, lines)
    yield ""


def text(words: str | None) -> str:
    """Words in Markdown: what is not in backticks has no meaning but its own."""
    parts = re.split(r"(`[^`]*`)", " ".join((words or "").split()))
    parts[::2] = [re.sub(r"([\\*_<>\[\]#|~^$])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
