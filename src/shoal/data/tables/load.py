"""A table of your own as :class:`~shoal.data.DomainData`, and the check of one.

A table is split by domain: those named in ``held_out`` are the test split, and a share of every other domain
is held out for validation. Whatever is fitted (means, categories, words) is fitted to training examples
alone.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.data.splits import SHARE, Names, split, split_notes
from shoal.data.tables import audit
from shoal.data.tables.cells import Format
from shoal.data.tables.encode import Encoder
from shoal.data.tables.kinds import DROPPED, ColumnType, Hints, infer, number_format
from shoal.data.tables.labels import Labels, domains_of, entities_of, unlabelled
from shoal.data.tables.read import need_column
from shoal.data.tables.table import Table, as_table
from shoal.errors import InputError, TableWarning
from shoal.options import DropRows, Kind
from shoal.options import Names as Columns
from shoal.settings import Range, checked

Array = NDArray[Any]


@checked
def from_table(
    table: Any,
    *,
    label: str,
    domain: str,
    held_out: Names = None,
    validation: float = SHARE,
    seed: int = 0,
    **options: Any,
) -> DomainData:
    """Load a table with a column of labels and a column of domains. ::

        data = shoal.data.from_table("patients.csv", label="ill", domain="hospital", held_out="oslo")
        model = shoal.models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        run = shoal.fit("fish", model, data, steps=300)
"""
