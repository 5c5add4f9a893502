"""The evidence page, from the archives of records alone.

    python benchmarks/evidence.py docs/evidence/records.md

``benchmarks/results/records`` has every record that the page uses. The questions, the rows and the rules of
the verdicts are in results/2026-11-19-plan.md, committed before the runs of that date.
"""

from __future__ import annotations

import sys
from pathlib import Path

import claims
import natural
import pacs

RECORDS = Path(__file__).parent / "results" / "records"
PAGE = """# Evidence from kept records

`python benchmarks/evidence.py docs/evidence/records.md` makes this page from
[`benchmarks/results/records`](../../benchmarks/results/records). Every number and every verdict comes from
these records; the linear example and the theorem are computed. The
[plan](../../benchmarks/results/2026-11-19-plan.md) with its questions, rules and amendments is older than
the runs of CdSprites and of the natural shifts.

## Claims of the paper

"Agrees": all checks of a claim hold. "Partly": some do. "Not run": there is no record. The
[rules](../../benchmarks/claims.py) are those of the plan.

{claims}

## CdSprites-N

Held-out accuracy in percent at the last step, mean ± standard deviation (number of seeds). Adam, learning
rate 1e-3, 12,000 minibatches of 64; Fish with ε = 0.1 and reset inner state. IDGM: normalized, trust 0.9,
1,500 updates.

{sprites}

## Natural shifts

One domain at a time is held out, or ten groups of domains. All rows have the same network, optimizer, steps
and early stopping, and their default hyperparameters, with one seed: the second seed and the trials of the
plan were not run. Text is encoded by a frozen MiniLM. The differences are paired by domain, their 95 %
intervals clustered by fold. "Better" and "worse" are meant after Holm's correction over the rows of a
dataset, at 5 %; the last column is the smallest true difference that is seen with 80 % power. AUC and
accuracy are in percent.

{natural}

## PACS

MobileNetV2 with ImageNet weights, version 0.3, 600 steps. Accuracy in percent, mean ± standard deviation
over seeds; intervals are clustered by domain. MIRO has a weight of 0.1 and ERM++ is that of version 0.3,
neither as its authors use it.

{pacs}

"""


def page() -> str:
    """The whole page."""
    paper = [RECORDS / "2026-11-17.tar.gz", RECORDS / "2026-11-19-cdsprites.tar.gz"]
    return PAGE.format(
        claims=claims.table(paper),
        sprites=claims.accuracies(paper),
        natural=natural.table(RECORDS / "2026-11-19-natural.tar.gz").strip(),
        pacs=pacs.table(RECORDS / "2026-11-17-pacs.jsonl.gz"),
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
