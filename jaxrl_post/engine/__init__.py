"""The engine: requests in, rollouts out, by rows."""
