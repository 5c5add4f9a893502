"""The documentation is true: its Python runs, commands parse, links lead somewhere, and the site builds."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.cli import main

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "tools"))
import command_line
import count_words
import roles

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
API = [page for page in sorted((DOCS / "reference").glob("*.md")) if count_words.is_api(page)]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *count_words.pages()]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"<!-- needs \$SHOAL_DATA/(\S+) -->")
IMAGE = re.compile(r"!\[(?P<alt>[^]]*)\]\(|<img\b(?P<tag>[^>]*)>")
RUN = [page for page in [*PAGES, *API] if page != DOCS / "guides" / "loops.md"]
"""The pages whose blocks run here; tests/test_integrations.py runs the other and compares what it trains."""
TYPED = ("", "console")
"""Languages of blocks with commands: those of consoles are run, the others read."""
CHEAPER = {
    "diagnose": "--examples 200 --steps 5 --device cpu",
    "compare": "--algorithms erm fish --seeds 1 --search 1 --steps 5 --device cpu --no-baselines",
    "sweep": "--algorithms erm fish --seeds 1 --search 1 --steps 5 --device cpu",
    "train": "--steps 10 --device cpu",
}
"""What a test adds to a command of a page; a later option counts."""


def _id(page: Path) -> str:
    """Pages of different folders may have the same name."""
    return str(page.relative_to(ROOT))


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


@pytest.mark.parametrize("page", RUN, ids=_id)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_without_data(page)
    monkeypatch.chdir(tmp_path)
    _run(page)


@pytest.mark.parametrize("page", [*PAGES, *API], ids=_id)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, *API], ids=_id)
def test_images_have_alternative_text(page: Path) -> None:
    for image in IMAGE.finditer(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        tag = re.search(r'alt="([^"]*)"', image["tag"] or "")
        alt = image["alt"] or (tag[1] if tag else "")
        assert len(alt.split()) >= 4, f"{image[0]}: describe the image in at least four words"


@pytest.mark.parametrize("folder", ["start", "guides"])
def test_only_evidence_reports_measurements(folder: str) -> None:
    for page in sorted((DOCS / folder).glob("*.md")):
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"\d\s*±", prose), f"{_id(page)}: move measurements to docs/evidence"


def test_pages_are_short() -> None:
    print(table := count_words.table())
    total = int(table.splitlines()[-1].split()[0].replace(",", ""))
    assert total <= count_words.CEILING, table


def test_what_counts_as_a_word() -> None:
    page = "# Two words\n\n| a | 97.0 ± 2.5 |\n\n```\nno\n```\n<!-- no -->[one](no.md) `x = 1` <sub>i</sub>"
    assert count_words.words(page) == 6


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


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser: argparse.ArgumentParser = command_line.program()
    for line in [line for _, _, text in _blocks(page, *TYPED) for line in _commands(text)]:
        words = _words(line)
        if "…" in words or words == ["--version"]:  # which the parser does not have
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


def _public() -> Iterator[str]:
    """The functions and classes that the reference must have, by where they are defined."""
    for module in (shoal, shoal.algorithms, shoal.data, shoal.models):
        for found in (getattr(module, name) for name in module.__all__):
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{found.__module__}.{found.__qualname__}"
    for module in (shoal.gradients, shoal.penalties):  # which have no __all__
        own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        yield from (f"{module.__name__}.{k}" for k, v in own.items() if k[0] != "_" and k != "P")
    yield from ("shoal.optim.Fish", "shoal.sklearn.DomainClassifier", "shoal.sklearn.DomainRegressor")
    for name in shoal.algorithms.registry.names():
        cls = shoal.algorithms.algorithm_class(name)
        yield f"{cls.__module__}.{cls.__qualname__}"


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
    reference = "".join(html for name, html in pages.items() if name.startswith("reference/"))
    missing = [name for name in _public() if f'id="{name}"' not in reference]
    assert not missing
    assert "Domain generalization" in pages["index.html"]
    assert "Fish" in pages["reference/optim.html"]
    assert "--held-out" in pages["reference/cli.html"]
    assert "plain loop" in pages["files/examples/plain_loop.py.html"]
