"""The paper's claims against run records: what was measured, with how many seeds, and whether it agrees.

A claim is data (``paper/claims.yaml``); its ``judge`` is one of the small functions here, which makes a
:class:`Judged` of :class:`Records`. Every number comes from a record. A judge makes checks and
:func:`verdict` counts them: all hold, *agrees*; none, *disagrees*; some, or all but some without a record,
*partly*. Runs in another setting than the experiment's own (smaller images, fewer steps) are shown but *not
judged*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.errors import InputError
from shoal.paper.evidence.cost import cost
from shoal.paper.evidence.linear import linear_longer, linear_printed, linear_same, linear_table, theorem
from shoal.paper.evidence.needs import CHEAP, commands, datasets, obstacles, swept
from shoal.paper.evidence.records import Kept, Records, collect
from shoal.paper.evidence.sprites import Sprites, sprites, sprites_similar
from shoal.paper.evidence.tables import (
    Cell,
    domainbed_rank,
    domainbed_values,
    shares,
    table_ahead,
    table_flat,
    table_shown,
    table_values,
)
from shoal.paper.evidence.tracking import TRACKED, gip_end, gip_rises, gip_update, tracked
from shoal.paper.evidence.verdicts import (
    AGREES,
    DISAGREES,
    NOT_JUDGED,
    NOT_RUN,
    PARTLY,
    VERDICTS,
    Check,
    Claim,
    Judge,
    Judged,
    reason,
    verdict,
)
from shoal.paper.published import claims as read_claims

__all__ = [
    "AGREES",
    "CHEAP",
    "DISAGREES",
    "NOT_JUDGED",
    "NOT_RUN",
    "PARTLY",
    "TRACKED",
    "VERDICTS",
    "Cell",
    "Check",
    "Claim",
    "Judged",
    "Kept",
    "Records",
    "Sprites",
    "collect",
    "commands",
    "datasets",
    "every_claim",
    "judge",
    "obstacles",
    "reason",
    "shares",
    "swept",
    "tracked",
    "verdict",
]

JUDGES: Mapping[str, Judge] = {
    f.__name__: f
    for f in (
        linear_table,
        linear_printed,
        linear_same,
        linear_longer,
        theorem,
        sprites,
        sprites_similar,
        cost,
        gip_rises,
        gip_update,
        gip_end,
        table_values,
        table_ahead,
        table_flat,
        table_shown,
        domainbed_values,
        domainbed_rank,
    )
}
"""By the name that ``claims.yaml`` calls them."""


def every_claim() -> list[Claim]:
    return [Claim(**entry) for entry in read_claims("claims")]


def judge(claim: Claim, records: Records, why: Mapping[str, str] | None = None) -> Judged:
    """``why`` says, by experiment, what kept it from being run here."""
    try:
        found = JUDGES[claim.judge](records, claim.options)
    except (InputError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}".rstrip(".")
        return Judged(NOT_JUDGED, reason=f"The records cannot be read as this experiment's ({said}).")
    if found.verdict != NOT_RUN and not found.lacks:
        return found
    said = " ".join(text for text in (found.reason, (why or {}).get(claim.needs)) if text)
    return replace(found, reason=said or "There is no record.")
