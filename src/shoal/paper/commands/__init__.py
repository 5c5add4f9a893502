"""Commands that repeat the paper."""
