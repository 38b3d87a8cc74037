"""Sessions of a run over HTTP, for a harness that plays its conversations (docs/agents.md)."""
