"""Thin adapters for callers from outside over the engine: OpenAI's HTTP interface, and JetStream."""
