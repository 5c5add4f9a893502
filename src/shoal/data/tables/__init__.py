"""Tables of your own: read, understood, checked and encoded."""

from shoal.data.own import Labels, check_table, domains_of, from_table
from shoal.data.table import Preprocessing, Tally
from shoal.data.tables.read import ENDINGS, ending, is_table, need_column, read

__all__ = [
    "ENDINGS",
    "Labels",
    "Preprocessing",
    "Tally",
    "check_table",
    "domains_of",
    "ending",
    "from_table",
    "is_table",
    "need_column",
    "read",
]
