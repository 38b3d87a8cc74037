"""How far the policy's distribution of the next token is from a teacher's, over all ids. Nothing here is jitted.

The measure is GKD's generalised Jensen-Shannon divergence (arXiv 2306.13649, section 3), as TRL's GKDTrainer has it. With
beta 1 it is the reverse KL, KL(policy || teacher), of MiniLLM (arXiv 2306.08543), token by token. With beta 0 it is the
forward KL, KL(teacher || policy).

Invariant: at most `chunk` tokens have their [V] logits in memory at once, of both models, in the forward and the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.algorithms import logprobs

TokenDivergence = tuple[Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"]]


def of_logs(own: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"], beta: float) -> Float[Array, "*rows"]:
    """Returns beta KL(teacher || m) + (1 - beta) KL(own || m), m = beta teacher + (1 - beta) own, from log-probs.

    At beta 0 and 1 it would be 0: there it stands for its slope, the KL of the direction that is left.
    """
    assert own.shape == teacher.shape and own.dtype == teacher.dtype, (own.shape, teacher.shape, own.dtype)
    if beta == 1:
        return jnp.sum(jnp.exp(own) * (own - teacher), axis=-1)
    if beta == 0:
        return jnp.sum(jnp.exp(teacher) * (teacher - own), axis=-1)
    mixed = jnp.logaddexp(own + math.log1p(-beta), teacher + math.log(beta))
    of_teacher = jnp.sum(jnp.exp(teacher) * (teacher - mixed), axis=-1)
    return beta * of_teacher + (1 - beta) * jnp.sum(jnp.exp(own) * (own - mixed), axis=-1)


def of_hidden(
    heads: tuple[Callable, Callable],
    hidden: tuple[Float[Array, "B T D"], Float[Array, "B T E"]],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    beta: float,
    used: int,
    chunk: int,
) -> TokenDivergence:
    """Returns, [B, T] each: log-prob of the targets, entropy, divergence from the teacher, and the reverse KL.

    Args:
      heads, hidden: hidden -> logits, and the last layer's output, of the policy and of the teacher. The policy's are
        differentiated.
      temperature: divides the logits of both.
      used: ids of the vocabulary; rows of a matrix beyond them are padding.
      chunk: tokens, over all rows, whose logits may exist at once.
    """

    def one(h: jax.Array, h_teacher: jax.Array, ids: jax.Array) -> TokenDivergence:
        own, teacher = (
            jax.nn.log_softmax(head(x)[..., :used] / temperature, axis=-1)
            for head, x in zip(heads, (h, h_teacher), strict=True)
        )
        teacher = jax.lax.stop_gradient(teacher).astype(own.dtype)
        chosen = jnp.sum(jnp.where(jnp.arange(used) == ids[..., None], own, 0.0), axis=-1)
        entropy = -jnp.sum(jnp.exp(own) * own, axis=-1)
        return chosen, entropy, of_logs(own, teacher, beta), jax.lax.stop_gradient(of_logs(own, teacher, 1))

    return logprobs.by_chunks(one, (*hidden, targets), chunk)
