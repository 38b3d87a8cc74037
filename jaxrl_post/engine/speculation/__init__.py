"""Speculative decoding: drafters, their tables, the texts that tables are built from, and acceptance rates."""
