"""The Python blocks in the documentation run as they stand, one after the other on each page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    world: dict[str, object] = {"__name__": "docs"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match[1], str(page), "exec")
        exec(code, world)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
