"""Thin adapters for callers from outside over the engine."""
