"""Faults that the tests must catch: one module per part of the house, each with FAULTS."""
