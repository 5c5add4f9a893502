"""The documentation is true: its blocks run, its commands parse, its links work, and the site builds."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import shoal
from shoal.cli.app import main, make_app

sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "tools"))
import count_words
import trace_numbers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "CONTRIBUTING.md", *count_words.pages()]
ALL = [*PAGES, *(page for page in sorted((DOCS / "reference").glob("*.md")) if count_words.is_api(page))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[(?P<alt>[^]]*)\]\(|<img\b(?P<tag>[^>]*)>")
SEPARATE = DOCS / "guides" / "loops.md"
"""tests/test_integrations.py runs its blocks and compares what they train."""
GENERAL = {"--help", "--version", "--json", "--config", "--install-completion"}
CHEAPER = {
    "diagnose": {"--max-examples": "100"},
    "compare": {
        **{"--algorithms": "erm", "--seeds": "1", "--search": "1", "--steps": "2"},
        **{"--jobs": "1", "--device": "cpu", "--no-baselines": ""},
    },
    "sweep": {"--algorithms": "erm", "--seeds": "1", "--search": "1", "--steps": "2", "--jobs": "1"},
    "train": {"--steps": "10", "--device": "cpu"},
}
"""Options that a test sets in place of those on a page."""


def _id(page: Path) -> str:
    """Pages of different folders may have the same name."""
    return str(page.relative_to(ROOT))


def _blocks(page: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """The blocks of a page in these languages, with their lines."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["language"] in languages:
            yield text[: match.start()].count("\n") + 1, match["language"], match["text"]


def _commands(block: str) -> list[list[str]]:
    """The words after ``shoal`` in each command of a block."""
    start = r"^(?:\$ )?(?:RAY_ADDRESS=\S+ )?(?:(?:torchrun|accelerate) .*-m )?shoal (.*)$"
    found = re.findall(start, block.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def _cheaper(words: list[str]) -> list[str]:
    """A command with the options of :data:`CHEAPER`."""
    options, kept, replaced = CHEAPER.get(words[0], {}), [], False
    for word in words:
        replaced = word in options if word.startswith("--") else replaced
        kept += [] if replaced else [word]
    return [*kept, *(part for option in options.items() for part in option if part)]


@pytest.mark.parametrize(
    "page", [p for p in ALL if p != SEPARATE and any(_blocks(p, "python", "console"))], ids=_id
)
@pytest.mark.filterwarnings("ignore")  # pages are about data that have something to warn of
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of a page and what it types into a console, in their order."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("docs")  # in which annotations of classes are evaluated
    monkeypatch.setitem(sys.modules, "docs", module)
    world = vars(module)
    for line, language, text in _blocks(page, "python", "console"):
        if language == "python":
            exec(compile("\n" * line + text, str(page), "exec"), world)
        else:
            for words in _commands(text):
                assert main(_cheaper(words)) == 0, words


def _unknown(words: list[str]) -> list[str]:
    """The commands and options among these words that do not exist."""
    _, apps, rest = make_app().parse_commands([word for word in words if word not in GENERAL])
    if len(apps) == 1:
        return rest[:1]
    known = {name for argument in apps[-1].assemble_argument_collection() for name in argument.names}
    return [w for w in rest if re.match(r"--\w", w) and w.split(".")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_commands_parse(page: Path) -> None:
    app = make_app()
    for words in (words for _, _, text in _blocks(page, "", "console") for words in _commands(text)):
        assert not _unknown(words), words
        if "…" not in words and words[0] not in GENERAL:
            app.parse_args(words, exit_on_error=False, print_error=False)
    prose = re.sub(r"<!--.*?-->", "", BLOCK.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL)
    for mention in re.findall(r"`shoal\s([^`]*)`", prose):  # which may leave arguments out
        assert not _unknown(shlex.split(mention)), mention


@pytest.mark.parametrize("page", ALL, ids=_id)
def test_links_and_images(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for image in IMAGE.finditer(BLOCK.sub("", text)):
        tag = re.search(r'alt="([^"]*)"', image["tag"] or "")
        alt = image["alt"] or (tag[1] if tag else "")
        assert len(alt.split()) >= 4, f"{image[0]}: describe the image in at least four words"


@pytest.mark.parametrize("page", trace_numbers.PAGES)
def test_every_number_of_a_page_is_in_its_results(page: str) -> None:
    assert "\n".join(trace_numbers.Page(trace_numbers.ROOT / page).untraced()) == ""


def test_pages_are_short() -> None:
    table = count_words.table()
    assert int(table.splitlines()[-1].split()[0].replace(",", "")) <= count_words.CEILING, table


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


def test_site_builds_without_warnings_and_loads_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
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
    assert not [name for name in _public() if f'id="{name}"' not in reference]
    commands = [name for name in make_app() if not name.startswith("-")]
    assert not [name for name in commands if f'id="shoal-{name}"' not in pages["reference/cli.html"]]
    options = shoal.options.declared(shoal.options.TrainOptions)
    assert not [name for name in options if f"{name}</span>" not in pages["reference/options.html"]]
    assert "Domain generalization" in pages["index.html"]
    assert "plain loop" in pages["files/examples/plain_loop.py.html"]
