"""The paper's claims against run records: what was measured, with how many seeds, and whether it agrees.

A claim is data (``published/claims.yaml``); its ``judge`` is one of the rules in
:mod:`~shoal.paper.evidence.rules`, which makes a ``Judged`` of ``Records``. Every number comes from a record.
A rule makes checks, and those that carry the claim make the verdict: see
:mod:`~shoal.paper.evidence.verdicts`, also for what counts as the same number. Runs in another setting than
the experiment's own (smaller images, fewer steps) are shown but *not judged*.
"""
