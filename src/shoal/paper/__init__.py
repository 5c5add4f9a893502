"""The paper's experiments that need no download, each a list of runs or a small exact computation."""
