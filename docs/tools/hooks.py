"""Hooks of mkdocs: the site also shows files outside docs, under the links that pages have for a Git host.

The README is its home page. Whatever else of the repository a page links to (results, examples, a folder)
gets a page of its own, so that no address of a host is needed. The commands on the page of the command line
are made from the program.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from shoal.cli.app import make_app

ROOT = Path(__file__).parents[2]
HOMES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Files of the repository with a place in the navigation."""
LANGUAGES = {".py": "python", ".yaml": "yaml"}
LINK = re.compile(r'(?P<before>\]\(|src=")(?P<to>(?![a-z]+:|#)[^)#"\s]+)')
FENCED = re.compile(r"^( *)(```+).*?^\1\2`*$|<!--.*?-->", re.DOTALL | re.MULTILINE)

sources: dict[str, str] = {}
"""The file of the repository that a page of the site is made from."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made."""
    sources.clear()
    sources.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    waiting = [*HOMES, *(source for source in sources.values() if source.endswith(".md"))]
    while waiting:
        source = waiting.pop()
        uri = place(source)
        if uri not in sources:
            sources[uri] = source
            files.append(File.generated(config, uri, content=shown(source)))
        waiting += [to for to in links(source) if place(to) not in sources and (ROOT / to).exists()]
    return files


def on_page_markdown(markdown: str, page: Any, **given: Any) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    if page.parent is None:  # a list of one page tells nothing
        page.meta["hide"] = ["navigation"]
    if uri.startswith("files/"):  # programs would fill the answers
        page.meta["search"] = {"exclude": True}
    source = sources.get(uri, f"docs/{uri}")
    markdown = markdown.replace("<!-- commands -->", commands() if "<!-- commands -->" in markdown else "")

    def there(found: re.Match[str]) -> str:
        to = posixpath.relpath(place(target(source, found["to"])), posixpath.dirname(uri) or ".")
        return found["before"] + to

    return outside_code(markdown, lambda text: LINK.sub(there, text))


def commands() -> str:
    """All commands with their options, without the overview that comes first."""
    text = make_app().generate_docs(usage_name="shoal").replace(" -m mkdocs", "")  # the running program
    return text[text.index("\n## shoal ") : text.index("\n## shoal --")].replace("```console", "```text")


def place(source: str) -> str:
    """Where the site has a file or folder of the repository."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source in HOMES:
        return HOMES[source]
    if (ROOT / source).is_dir():
        return f"files/{source}/index.md"
    return f"files/{source}" if source.endswith(".md") else f"files/{source}.md"


def shown(source: str) -> str:
    """A page for a file or folder: Markdown as it is, a folder as a list, everything else as code."""
    path = ROOT / source
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        lines = (name if name.endswith(".gz") else f"[{name}]({path.name}/{name})" for name in names)
        return f"# {source}\n\n" + "".join(f"- {line}\n" for line in lines)
    text = path.read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    return f"# {path.name}\n\n`{source}`\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n`````\n"


def links(source: str) -> Iterator[str]:
    """The files that a page links to."""
    if (ROOT / source).is_dir() or source.endswith(".md"):
        text = shown(source)
        yield from (target(source, found["to"]) for found in LINK.finditer(FENCED.sub("", text)))


def target(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def outside_code(markdown: str, change: Any) -> str:
    """The text with everything changed but blocks of code."""
    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
