"""Schedulers that work in rounds: synchronous, tail batching, RollPacker, and what stands around them."""
