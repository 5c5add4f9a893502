"""A dataset that adds the domain index to each item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from shoal.data.domains import Domains
from shoal.errors import InputError


class WithDomain(Dataset[Any]):
    """Adds the domain index to each item of ``dataset``: ``(x, y)`` becomes ``(x, y, domain)``.

    A mapping gets the key ``"domain"``. Domains are numbered from 0 in the order of ``domains.names``: the
    sorted order of the labels. For example, a mixed batch for the functions of :mod:`shoal.penalties`:

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import torch
    >>> from shoal.data import DomainBatchSampler
    >>> patients = TensorDataset(torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0]))
    >>> data = WithDomain(patients, ["oslo", "oslo", "lima", "lima", "oslo", "lima"])
    >>> sampler = DomainBatchSampler(data.domains, batch_size=2, mixed=True)
    >>> x, y, domain = next(iter(DataLoader(data, batch_sampler=sampler)))
    >>> x.shape, domain.bincount()
    (torch.Size([4, 4]), tensor([2, 2]))

    Args:
        dataset: a map-style dataset whose items are tuples or lists ``(x, y)``, or mappings.
        domains: one label (integer or string) for each example, or a :class:`Domains` in which each example
            is in one domain.
    """

    domains: Domains

    def __init__(self, dataset: Any, domains: Domains | Any) -> None:
        self.dataset = dataset
        self.domains = domains if isinstance(domains, Domains) else Domains.from_labels(domains)
        found = self.domains
        if not np.array_equal(np.sort(found.indices), np.arange(len(dataset))):
            raise InputError(
                f"domains hold {len(found.indices)} entries and the dataset {len(dataset)} examples; each "
                "example must be in one domain."
            )
        self._numbers = np.empty(len(dataset), dtype=np.int64)
        self._numbers[found.indices] = np.repeat(np.arange(len(found)), found.sizes)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._with_domain(self.dataset[index], index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several items at once, which is faster with Hugging Face datasets; called by ``DataLoader``."""
        together = getattr(self.dataset, "__getitems__", None)
        items = together(indices) if together else [self.dataset[i] for i in indices]
        return [self._with_domain(item, i) for item, i in zip(items, indices, strict=True)]

    def _with_domain(self, item: Any, index: int) -> Any:
        domain = int(self._numbers[index])
        if isinstance(item, Mapping):
            return {**item, "domain": domain}
        if isinstance(item, (tuple, list)):
            return (*item, domain)
        raise InputError(
            f"item {index} of the dataset is a {type(item).__name__}; it must be a tuple (x, y) or a mapping."
        )
