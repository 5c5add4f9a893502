"""Counts the words of the hand-written documentation: ``python docs/tools/count_words.py``.

A word contains a letter. Words in code blocks, comments and link targets do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("start", "guides", "reference", "evidence")
CEILING = 10_350
"""The most words of all pages together."""
OMITTED = re.compile(
    r"^( *)```.*?^\1```$|<!--.*?-->|(?<=\])\([^)]*\)|</?[a-z][^>]*>", re.DOTALL | re.MULTILINE
)


GENERATED = "evidence/records.md"
"""A page made from records."""


def is_api(page: Path) -> bool:
    """Whether the page is generated from docstrings, or from records."""
    text = page.read_text(encoding="utf-8")
    return str(page).endswith(GENERATED) or re.search(r"^::: ", text, re.MULTILINE) is not None


def pages() -> list[Path]:
    """The README and the pages that are not generated from docstrings."""
    found = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return [ROOT / "README.md", *(page for page in found if not is_api(page))]


def words(text: str) -> int:
    return sum(re.search(r"[^\W\d_]", word) is not None for word in OMITTED.sub(" ", text).split())


def table() -> str:
    counts = {str(page.relative_to(ROOT)): words(page.read_text(encoding="utf-8")) for page in pages()}
    counts["all"] = sum(counts.values())
    return "\n".join(f"{count:7,}  {name}" for name, count in counts.items())


if __name__ == "__main__":
    print(table())
