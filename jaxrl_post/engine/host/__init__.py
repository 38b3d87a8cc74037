"""The host side of a row engine: admission, KV-cache pages, row sizes, and what passes to and from a device. No jax."""
