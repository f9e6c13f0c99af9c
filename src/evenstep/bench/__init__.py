"""Benchmarks that a user can run on their own machines: ``evenstep bench NAME``."""
