"""What experiments there are, what to type for each, and what stands in its way here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.errors import InputError
from shoal.paper import recipes, tables
from shoal.paper.evidence.rules import plain
from shoal.paper.published import claims

CHEAP = ("theorem", "linear")
"""Experiments of about a minute."""
OF_REPRODUCE = (*CHEAP, "cdsprites", "cost", "grouping", "wilds", *recipes.ABLATIONS)
TRACKED = 3
"""Seeds of `shoal track`."""
NO_GPU = "It requires a GPU, and this machine has none."


def commands(out: str) -> dict[str, str]:
    """By experiment: what to type for its records to be in the folder ``out``."""
    sweep = f"shoal sweep {' '.join(datasets()['domainbed'])} --algorithms {' '.join(swept())}"
    return {name: f"shoal reproduce {name} --out {out}" for name in OF_REPRODUCE} | {
        "track": f"shoal track cdsprites --out {out}/track",
        "track-wilds": f"shoal track camelyon17 --preset paper --out {out}/track",
        "domainbed": f"{sweep} --seeds 5 --out {out}/domainbed",
    }


def swept() -> list[str]:
    """The algorithms of DomainBed's table, as Shoal calls them."""
    first = next(c for c in claims("domainbed") if c["table"] == "DomainBed")
    return [plain(name) for name in first["values"]]


def datasets() -> dict[str, list[str]]:
    """By experiment: the datasets whose files it needs."""
    of_sweeps = [c["names"][0] for c in claims("domainbed") if c["table"] == "DomainBed" and c["names"]]
    of_grouping = [name for name in tables.grouping_claims() if name != "cdsprites"]
    of_wilds = dict.fromkeys(("wilds", "track-wilds", *recipes.ABLATIONS), recipes.datasets())
    return {"grouping": of_grouping, "domainbed": of_sweeps} | of_wilds


def obstacles(needs: Iterable[str], load: Callable[[str], object], gpu: bool) -> dict[str, str]:
    """By experiment without records: why it was not run here.

    ``load`` loads a dataset, or raises an :class:`InputError` that says what is missing.
    """
    wanted = datasets()
    result = {}
    for need in needs:
        lacks = {}
        for name in wanted.get(need, ()):
            try:
                load(name)
            except (InputError, OSError, ImportError) as error:
                lacks[name] = str(error).rstrip(".")
        slow = [NO_GPU] if need not in CHEAP and not gpu else []
        result[need] = " ".join([*_lacking(lacks), *slow])
    return result


def _lacking(lacks: dict[str, str]) -> list[str]:
    """All by name, the first with its reason, and those that can be fetched."""
    if not lacks:
        return []
    get = [name for name, why in lacks.items() if "shoal data get" in why]
    fetched = [f"`shoal data get {' '.join(get)}` downloads what is available."] if get else []
    name, why = next(iter(lacks.items()))
    return [f"Missing data: {', '.join(lacks)}.", f"{name}: {why}.", *fetched]
