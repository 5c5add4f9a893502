"""The training loop, evaluation, and the verbs that algorithms train with."""
