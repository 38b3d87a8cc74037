"""What flows between rooms, the contracts between them, and the loop that turns; no jax."""
