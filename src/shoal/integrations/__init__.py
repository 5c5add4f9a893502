"""Shoal in the training loops of others: :mod:`shoal.integrations.lightning`, and
:mod:`shoal.integrations.transformers`. Neither package is imported before its module here is."""
