"""Speculative decoding: drafters, their tables, what they are built from, and their acceptance rates."""
