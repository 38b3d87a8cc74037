"""jaxrl_post: RL post-training of language models in JAX; what makes it fast never changes a token."""

__version__ = "0.1.0"
