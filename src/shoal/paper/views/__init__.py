"""Views of the paper's experiments: tables and figures beside its numbers."""
