"""Faults that the tests must catch: one list for each part of the house, and how a fault is planted."""
