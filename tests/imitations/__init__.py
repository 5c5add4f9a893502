"""Small imitations of published datasets, in their layouts, for tests and benchmarks."""
