"""Runs as data: a configuration goes in, a record comes out, tables are made from records."""
