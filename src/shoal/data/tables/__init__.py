"""Tables of your own: read, understood, checked and encoded."""

from shoal.data.tables.encode import Encoder, Unknown
from shoal.data.tables.kinds import quoted
from shoal.data.tables.labels import Labels, domains_of
from shoal.data.tables.load import SHARE, Names, TableRows, check_table, from_table, names_of, split_notes
from shoal.data.tables.read import ENDINGS, ending, is_table, need_column, plain, read
from shoal.data.tables.table import Column, Table, as_table

__all__ = [
    "ENDINGS",
    "SHARE",
    "Column",
    "Encoder",
    "Labels",
    "Names",
    "Table",
    "TableRows",
    "Unknown",
    "as_table",
    "check_table",
    "domains_of",
    "ending",
    "from_table",
    "is_table",
    "names_of",
    "need_column",
    "plain",
    "quoted",
    "read",
    "split_notes",
]
