"""An extension of griffe: docstrings become Markdown, and options show their types and defaults."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(~?)([^`]+)`")
SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
CODE_FOLLOWS = re.compile(r"(?m)(?<=\S)( ?)::$")


def _role(found: re.Match[str]) -> str:
    """A name in code, which is a link where the reference has the object."""
    short, name = found.groups()
    shown = name.rsplit(".", 1)[-1] if short else name
    if "." not in name:
        return f"`{shown}`"
    return f'<autoref optional identifier="{name}"><code>{shown}</code></autoref>'


def markdown(docstring: str) -> str:
    text = SESSION.sub(lambda found: f"```pycon\n{found[0]}\n```", docstring)
    return CODE_FOLLOWS.sub(lambda found: "" if found[1] else ":", ROLE.sub(_role, text))


class Roles(griffe.Extension):
    """Applied to every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **given: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **given: Any) -> None:
        """``Annotated[int, Option(3, "train")]`` becomes ``int = 3``."""
        note = attr.annotation
        if isinstance(note, griffe.ExprSubscript) and str(note).startswith("Annotated["):
            kind, *_, option = note.slice.elements  # type: ignore[union-attr]
            if isinstance(option, griffe.ExprCall) and str(option.function) == "Option":
                attr.annotation = kind
                attr.value = option.arguments[0] if option.arguments else "None"
