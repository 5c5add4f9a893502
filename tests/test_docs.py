"""The documentation is true: its Python runs, commands parse, links lead somewhere, and the site builds."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli import main

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "tools"))
import command_line
import roles

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"<!-- needs \$SHOAL_DATA/(\S+) -->")
RUN = [page for page in PAGES if page.name != "your-loop.md"]
"""The pages whose blocks run here; tests/test_integrations.py runs the other and compares what it trains."""
TYPED = ("", "console")
"""Languages of blocks with commands: those of consoles are run, the others read."""
CHEAPER = {
    "diagnose": "--examples 200 --steps 5 --device cpu",
    "compare": "--algorithms erm fish --seeds 1 --search 1 --steps 5 --held-out va --no-baselines",
    "train": "--steps 10 --device cpu",
}
"""What a test adds to a command of the tutorial; a later option counts."""


def _blocks(page: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """The blocks of a page in these languages, with their lines."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["language"] in languages:
            yield text[: match.start()].count("\n") + 1, match["language"], match["text"]


def _run(page: Path) -> None:
    """The Python of a page and what it types into a console, in their order."""
    world: dict[str, object] = {"__name__": "docs"}
    for line, language, text in _blocks(page, "python", "console"):
        if language == "python":
            exec(compile("\n" * line + text, str(page), "exec"), world)
        else:
            for command in _commands(text):
                words = _words(command)
                assert main([*words, *CHEAPER.get(words[0], "").split()]) == 0, command


def _skip_without_data(page: Path) -> None:
    for name in NEEDS.findall(page.read_text(encoding="utf-8")):
        if not Path(os.environ.get("SHOAL_DATA", "nowhere"), name).exists():
            pytest.skip(f"{page.name} is about real data: SHOAL_DATA must hold {name}")


@pytest.mark.parametrize("page", RUN, ids=lambda p: p.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_without_data(page)
    monkeypatch.chdir(tmp_path)
    _run(page)


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda p: p.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def _commands(block: str) -> list[str]:
    """What calls shoal, from the word after it on."""
    lines = block.replace("\\\n", " ")
    return re.findall(r"^(?:\$ )?(?:(?:torchrun|accelerate) .*-m )?shoal (.*)$", lines, re.MULTILINE)


def _mentions(page: Path) -> list[str]:
    """The same of code within sentences."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(words.split()) for words in re.findall(r"`shoal\s([^`]*)`", prose)]


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def _unknown(words: list[str]) -> list[str]:
    """The commands and options among these words that do not exist; an example may leave things out."""
    parser = command_line.program()
    known = {"--help", "--version"}
    for word in words:
        below = command_line.commands(parser)
        if word in below:
            parser = below[word]
            known |= set(parser._option_string_actions)
        elif below and parser.prog == "shoal":
            return [] if word in known else [word]
        else:
            break
    return [w for w in words if re.match(r"--\w", w) and w.split("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser: argparse.ArgumentParser = command_line.program()
    for line in [line for _, _, text in _blocks(page, *TYPED) for line in _commands(text)]:
        words = _words(line)
        if "…" in words:
            assert not _unknown(words), line
            continue
        try:
            parser.parse_args(words)
        except SystemExit:
            pytest.fail(f"shoal {line}\n{capsys.readouterr().err}")
    for line in _mentions(page):
        assert not _unknown(_words(line)), f"shoal {line}"


def test_wrong_commands_are_noticed(tmp_path: Path) -> None:
    """The tests above can fail."""
    page = tmp_path / "page.md"
    page.write_text("```\nshoal train \\\nfish # why\n$ shoal show runs\n```\nand `shoal\nlist --all`\n")
    ((_, _, block),) = _blocks(page, *TYPED)
    assert [_words(line) for line in _commands(block)] == [["train", "fish"], ["show", "runs"]]
    assert _mentions(page) == ["list --all"]
    assert _unknown(["list", "--all"]) == ["--all"]
    assert _unknown(["lost"]) == ["lost"]
    assert not _unknown(["data", "get", "pacs", "--plan"])


def test_roles_become_markdown() -> None:
    given = "See :class:`~shoal.data.Domains`, :func:`gip`. ::\n\n    code\n\n>>> 1 + 1\n2\n\nEnd."
    link = '<autoref optional identifier="shoal.data.Domains"><code>Domains</code></autoref>'
    session = "```pycon\n>>> 1 + 1\n2\n```"
    assert roles.markdown(given) == f"See {link}, `gip`.\n\n    code\n\n{session}\n\nEnd."
    assert roles.markdown("As here::\n\n    code") == "As here:\n\n    code"


def test_every_option_is_in_the_reference() -> None:
    page = command_line.page()
    for name, parser in command_line.commands(command_line.program()).items():
        section = page.split(f"\n## shoal {name}\n")[1].split("\n## ")[0]
        assert all(
            option in section for option in parser._option_string_actions if option not in ("-h", "--help")
        )


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs-material and mkdocstrings build the site",
)
def test_site_builds_without_warnings_and_loads_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    for name, html in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]+)', html)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]* href="(https?:[^"]+)', html)
        assert not loaded, (name, loaded)
        assert not re.search(r":(?:class|func|meth|mod|data|attr):<code>", html), name
    assert "Domain generalization" in pages["index.html"]
    assert "Fish" in pages["reference/optim.html"]
    assert "--held-out" in pages["reference/cli.html"]
    assert "plain loop" in pages["files/examples/plain_loop.py.html"]
