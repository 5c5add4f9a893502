"""The numbers of the paper that are checked against."""

from __future__ import annotations

from shoal.paper.published import published


def test_claims_on_cdsprites_are_complete() -> None:
    for claim in published("cdsprites"):
        assert set(claim) == {"method", "domains", "split", "relation", "value", "words"}
        assert claim["relation"] in ("about", "at least", "below")


def test_the_domainbed_table_is_complete() -> None:
    """Seven datasets and their average by ten methods, and three datasets of random grouping."""
    every = published("domainbed")
    main = [c for c in every if c["table"] == "DomainBed"]
    assert [c["dataset"] for c in main] == [
        *("CMNIST", "RMNIST", "VLCS", "PACS", "OfficeHome", "TerraInc", "DomainNet", "Average")
    ]
    methods = ["ERM", "IRM", "GroupDRO", "Mixup", "MLDG", "Coral", "MMD", "DANN", "CDANN", "Fish"]
    assert all(list(c["values"]) == methods for c in main)
    *each, average = main
    for method in methods:  # the averages printed are those of the column, to the last digit or one beside
        mean = sum(c["values"][method][0] for c in each) / 7
        assert abs(mean - average["values"][method][0]) <= 0.1, method
    others = [c for c in every if c["table"] == "random grouping"]
    assert [c["dataset"] for c in others] == ["VLCS", "PACS", "OfficeHome"]
    assert all(list(c["values"]) == ["Fish", "Fish, RG", "ERM"] for c in others)
