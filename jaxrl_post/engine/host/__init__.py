"""The host's side of a row engine: who sits in which slot, on which pages, and what a dispatch is given and tells. No jax."""
