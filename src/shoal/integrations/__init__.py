"""Integrations with other trainers: :mod:`shoal.integrations.lightning` and
:mod:`shoal.integrations.transformers`. Import the one you need; neither package is imported otherwise."""
