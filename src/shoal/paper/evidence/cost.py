"""What direct gradient matching costs."""

from __future__ import annotations

from shoal.paper.evidence.records import Records
from shoal.paper.evidence.verdicts import HOLDS, Check, Judged, Options, judged, sign, span


def cost(records: Records, options: Options) -> Judged:
    checks, rows, shown = [], [], []
    rounds: list[int] = []
    kept = records.files.get("cost.json", ())
    for one in kept:
        device = str(one.content.get("environment", {}).get("device", "?"))
        for row in one.content["rows"]:
            ratio, erm = float(row["ratio_to_fish"]), row.get("ratio_to_erm")
            how = f"{row['network']}, {row['how']}" if row.get("how") else str(row["network"])
            holds = None
            if row["method"] == options["method"]:
                holds = options["low"] <= ratio <= options["high"]
                checks.append(Check(f"{how} on {device}", holds))
                shown.append(f"{ratio:.1f} × ({how}, {device})")
                rounds.append(len(row.get("rounds", ())))
            beside = "–" if erm is None else f"{float(erm):.2f} ×"
            rows.append([device, how, str(row["method"]), f"{ratio:.2f} ×", beside, sign(holds)])
    columns = ("device", "network", "method", "of Fish's step", "of S plain steps", HOLDS)
    return judged(
        checks,
        ours="; ".join(shown) or "–",
        seeds=f"{span(rounds)} rounds" if rounds else "–",
        columns=columns,
        rows=rows,
        used=kept,
        data=[
            {**row, "device": one.content.get("environment", {}).get("device", "?")}
            for one in kept
            for row in one.content["rows"]
        ],
    )
