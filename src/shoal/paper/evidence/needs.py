"""What experiments there are, what to type for each, and what stands in its way here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shoal.errors import InputError
from shoal.paper.evidence.tables import plain
from shoal.paper.published import claims as read_claims

CHEAP = ("theorem", "linear")
"""Experiments of about a minute."""
NO_GPU = "It is meant for a GPU, and this machine has none."


def commands(out: str) -> dict[str, str]:
    """By experiment: what to type for its records to be in the folder ``out``."""
    tables = {name: f"shoal reproduce {name} --out {out}" for name in TABLES}
    many = f"shoal sweep {' '.join(datasets()['domainbed'])} --algorithms {' '.join(swept())}"
    return tables | {
        "track": f"shoal track cdsprites --out {out}/track",
        "track-wilds": f"shoal track camelyon17 --preset paper --out {out}/track",
        "domainbed": f"{many} --seeds 5 --out {out}/domainbed",
    }


def swept() -> list[str]:
    """The algorithms of DomainBed's table, as Shoal calls them."""
    first = next(c for c in read_claims("domainbed") if c["table"] == "DomainBed")
    return [plain(name) for name in first["values"]]


TABLES = (
    "linear",
    "theorem",
    "cdsprites",
    "cost",
    "grouping",
    "wilds",
    "warm-start",
    "rates",
    "meta-steps",
    "smoothfish",
)
"""Experiments of `shoal reproduce`."""


def datasets() -> dict[str, list[str]]:
    """By experiment: the datasets whose files it needs."""
    from shoal.paper import grouping, recipes

    of_sweeps = [c["names"][0] for c in read_claims("domainbed") if c["table"] == "DomainBed" and c["names"]]
    of_grouping = [name for name in grouping.said() if name != "cdsprites"]
    of_wilds = dict.fromkeys(("wilds", "track-wilds", *recipes.ABLATIONS), recipes.datasets())
    return {"grouping": of_grouping, "domainbed": of_sweeps} | of_wilds


def obstacles(needs: Iterable[str], loads: Callable[[str], object], gpu: bool) -> dict[str, str]:
    """By experiment without records: why it was not run here.

    ``loads`` loads a dataset, or raises an :class:`InputError` that says what is missing.
    """
    wanted = datasets()
    found = {}
    for need in needs:
        lacks = [why for name in wanted.get(need, ()) if (why := _lacks(name, loads))]
        slow = need not in CHEAP and not gpu
        found[need] = " ".join([*_said(lacks), *([NO_GPU] if slow else [])])
    return found


def _lacks(name: str, loads: Callable[[str], object]) -> tuple[str, str] | None:
    """A dataset that cannot be loaded, and why."""
    try:
        loads(name)
    except (InputError, OSError, ImportError) as error:
        return name, str(error).rstrip(".")
    return None


def _said(lacks: Sequence[tuple[str, str]]) -> list[str]:
    """All by name, the first with its reason, and those that can be fetched."""
    if not lacks:
        return []
    get = [name for name, why in lacks if "shoal data get" in why]
    fetched = [f"`shoal data get {' '.join(get)}` fetches what can be had."] if get else []
    first = f"{lacks[0][0]}: {lacks[0][1]}."
    return [f"Data are missing: {', '.join(name for name, _ in lacks)}.", first, *fetched]
