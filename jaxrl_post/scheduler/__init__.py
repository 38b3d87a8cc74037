"""Who decides what is generated and what is trained: host code that reads no clock, does no I/O and imports no jax."""
