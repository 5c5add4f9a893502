"""DomainBed's hyperparameters as its registry has them (commit 04cfc61): defaults, and what is drawn.

Algorithms and settings have Shoal's names.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A default; and base^U(low, high), U(low, high) without a base, or one of ``choice``; or its int."""

    default: Any
    base: float | None = None
    low: float = 0.0
    high: float = 0.0
    choice: tuple[Any, ...] = ()
    whole: bool = False

    def at(self, share: float) -> Any:
        """The value at this share of the way through what is drawn from."""
        if self.choice:
            for place, value in enumerate(self.choice):
                if share < (place + 1) / len(self.choice):
                    return value
        power = self.low + share * (self.high - self.low)
        value = power if self.base is None else self.base**power
        return int(value) if self.whole else value


def constant(value: Any) -> Entry:
    return Entry(value, choice=(value,))


ANNEALING = Entry(500, 10, 0, 4, whole=True)  # in steps, of which a training has 5,001
ADVERSARIAL = {
    "weight": Entry(1.0, 10, -2, 2),
    "discriminator_weight_decay": Entry(0.0, 10, -6, -2),
    "discriminator_steps": Entry(1, 2, 0, 3, whole=True),
    "gradient_penalty": Entry(0.0, 10, -2, 1),
    "beta1": Entry(0.5, choice=(0.0, 0.5)),
    "width": Entry(256, 2, 6, 10, whole=True),
    "depth": Entry(3, choice=(3, 4, 5)),
    "dropout": Entry(0.0, choice=(0.0, 0.1, 0.5)),
}
RATES = {"small": Entry(1e-3, 10, -4.5, -2.5), "large": Entry(5e-5, 10, -5, -3.5)}
DECAYS = {"small": constant(0.0), "large": Entry(0.0, 10, -6, -2)}
BATCHES = {"small": Entry(64, 2, 3, 9, whole=True), "large": Entry(32, 2, 3, 5.5, whole=True)}
DOMAINNET_BATCHES = Entry(32, 2, 3, 5, whole=True)
DROPOUT = Entry(0.0, choice=(0.0, 0.1, 0.5))


def own(algorithm: str, size: str) -> dict[str, Entry]:
    """The entries of an algorithm alone; lr_g and weight_decay_g are drawn as all algorithms' are."""
    table = {
        "dann": {**ADVERSARIAL, "discriminator_lr": RATES[size]},
        "cdann": {**ADVERSARIAL, "discriminator_lr": RATES[size]},
        "fish": {"meta_lr": Entry(0.5, choice=(0.05, 0.1, 0.5))},
        "irm": {"weight": Entry(100.0, 10, -1, 5), "start": ANNEALING},
        "vrex": {"weight": Entry(10.0, 10, -1, 5), "start": ANNEALING},
        "mixup": {"alpha": Entry(0.2, 10, -1, 1)},
        "groupdro": {"step_size": Entry(0.01, 10, -3, -1)},
        "mmd": {"weight": Entry(1.0, 10, -1, 1)},
        "coral": {"weight": Entry(1.0, 10, -1, 1)},
        "mldg": {"beta": Entry(1.0, 10, -1, 1), "held_out": Entry(2, choice=(1, 2))},
        "and-mask": {"tau": Entry(1.0, None, 0.5, 1.0)},
        "iga": {"weight": Entry(1000.0, 10, 1, 5)},
        "sand-mask": {"tau": Entry(1.0, None, 0.0, 1.0), "k": Entry(10.0, 10, -3, 5)},
        "fishr": {
            "weight": Entry(1000.0, 10, 1, 4),
            "start": Entry(1500, None, 0, 5000, whole=True),
            "ema": Entry(0.95, None, 0.9, 0.99),
        },
        # Of the burn-in DomainBed takes no int; it ends at the next whole step.
        "eqrm": {
            "quantile": Entry(0.75, None, 0.5, 0.99),
            "start": Entry(2500, 10, 2.5, 3.5, whole=True),
            "quantile_lr": Entry(1e-6, 10, -7, -5),
        },
        "erm": {},
    }
    return table[algorithm]


ALGORITHMS = ("dann", "cdann", "fish", "irm", "vrex", "mixup", "groupdro", "mmd", "coral", "mldg")
ALGORITHMS += ("and-mask", "iga", "sand-mask", "fishr", "eqrm", "erm")
