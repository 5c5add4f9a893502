"""Domains, meta-batches, samplers, loaders and splits; and data of your own."""

from shoal.data.batch import DomainBatch, DomainData, Examples, InMemory, Task, TensorData
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader, concatenate
from shoal.data.own import from_arrays, from_dataset, from_hf, from_table
from shoal.data.sampler import DomainBatchSampler
from shoal.data.splits import hold_out_domains, hold_out_examples
from shoal.data.with_domain import WithDomain

__all__ = [
    "DomainBatch",
    "DomainBatchSampler",
    "DomainData",
    "Domains",
    "Examples",
    "InMemory",
    "MetaBatchLoader",
    "Task",
    "TensorData",
    "WithDomain",
    "concatenate",
    "from_arrays",
    "from_dataset",
    "from_hf",
    "from_table",
    "hold_out_domains",
    "hold_out_examples",
]
