"""Tables of your own: read, understood, checked and encoded."""

from shoal.data.tables.encode import Encoder
from shoal.data.tables.kinds import quoted
from shoal.data.tables.labels import Labels, domains_of
from shoal.data.tables.load import TableRows, check_table, from_table
from shoal.data.tables.read import ENDINGS, ending, is_table, need_column, read
from shoal.data.tables.table import Column, Table, as_table

__all__ = [
    "ENDINGS",
    "Column",
    "Encoder",
    "Labels",
    "Table",
    "TableRows",
    "as_table",
    "check_table",
    "domains_of",
    "ending",
    "from_table",
    "is_table",
    "need_column",
    "quoted",
    "read",
]
