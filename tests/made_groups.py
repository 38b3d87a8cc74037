"""Made-up scored groups, and a second, plain way to the learner's gradient: one sequence per row, the papers'
formulas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from dense_attend import dense

from jaxrl_post.models import decoder
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId

MODEL = decoder.ModelConfig(
    vocab_size=32, embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffw=24, max_length=64, tied=True
)


def rollout(
    prompt: Prompt, sample: int, tokens, *, logprobs=None, sampled=None, version: int = 0, finish: Finish = Finish.EOS
) -> Rollout:
    n = len(tokens)
    return Rollout(
        id=RolloutId(0, "train", 0, prompt.id, sample),
        prompt=prompt,
        tokens=tokens,
        sampled=np.ones(n, bool) if sampled is None else sampled,
        logprobs=np.full(n, -1.0) if logprobs is None else logprobs,
        entropies=np.zeros(n),
        versions=np.full(n, version),
        drafted=np.zeros(n, bool),
        finish=finish,
        start_clock=0,
        finish_clock=1,
    )


def groups(
    count: int = 5, size: int = 4, *, longest: int = 20, vocab: int = 32, seed: int = 0, unscored: bool = True
) -> list[Group]:
    """Returns `count` groups. Prompts have 2 to 6 tokens, and rollouts 1 to `longest`.

    One rollout of the second group is unscored. One of the third has observed tokens in its middle."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(count):
        prompt = Prompt(id=f"p{g}", tokens=rng.integers(0, vocab, rng.integers(2, 7)))
        rollouts = []
        for i in range(size):
            n = int(rng.integers(1, longest + 1)) if (g, i) != (2, 0) else longest
            sampled = np.ones(n, bool)
            if (g, i) == (2, 0):
                sampled[4:9] = False
            rollouts.append(rollout(prompt, i, rng.integers(0, vocab, n), sampled=sampled, logprobs=-3 * rng.random(n)))
        scored = np.ones(size, bool)
        scored[0] = not (unscored and g == 1)
        out.append(Group(prompt=prompt, rollouts=tuple(rollouts), rewards=rng.integers(0, 4, size) / 3, scored=scored))
    return out


def weights(seed: int = 0, dtype=np.float32, model: decoder.ModelConfig = MODEL):
    return jax.tree.map(lambda x: np.asarray(x, dtype), decoder.init(model, seed))


def moved(params, seed: int, scale: float = 0.02):
    """Other weights near `params`: ratios are not 1, and no log-ratio is near the clamps of the losses."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + (scale * rng.standard_normal(x.shape)).astype(x.dtype), params)


def unpacked(found: list[Group]):
    """tokens, targets' mask and owner of every rollout in a row of its own: [n, T] arrays and (group, sample) pairs."""
    members = [(g, i) for g, group in enumerate(found) for i in range(len(group.rollouts))]
    T = max(found[g].rollouts[i].prompt.tokens.size + len(found[g].rollouts[i]) for g, i in members)
    tokens, mask = np.zeros((len(members), T), np.int32), np.zeros((len(members), T), bool)
    for n, (g, i) in enumerate(members):
        r = found[g].rollouts[i]
        start, end = r.prompt.tokens.size, r.prompt.tokens.size + len(r)
        tokens[n, :end] = np.concatenate([r.prompt.tokens, r.tokens])
        mask[n, start:end] = r.sampled & found[g].scored[i]
    return tokens, mask, members


def plain_scores(params, model, tokens, temperature: float = 1.0):
    """Log-prob of each token (0 for the first) and entropy there, [n, T], by a whole softmax."""
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    dtype = jax.tree.leaves(params)[0].dtype
    h, _ = decoder.hidden(params, model, tokens, positions, dense(positions), None, dtype=dtype)
    logps = jax.nn.log_softmax(decoder.logits(params, model, h) / temperature)
    chosen = jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    entropies = -jnp.sum(jnp.exp(logps) * logps, axis=-1)[:, :-1]
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropies))


def plain_policy_loss(loss_mode: str, logps, gap, mask, a, low: float, high: float):
    """Per token, one sequence per row; `gap` is the log-ratio. GSPO's ratio is the geometric mean itself, with no
    stop-gradient."""
    ratio = jnp.exp(gap)
    if loss_mode == "gspo":
        means = jnp.sum(jnp.where(mask, gap, 0), axis=1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)
        ratio = jnp.broadcast_to(jnp.exp(means), gap.shape)
    if loss_mode == "cispo":
        return -jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high)) * a * logps
    if loss_mode == "sapo":
        tau = jnp.where(a > 0, 1.0, 1.05)
        return -a * 4 / tau / (1 + jnp.exp(-tau * (ratio - 1)))
    if loss_mode == "geo_mean":  # the sequence's product of bounded ratios, to the power of one over its length
        sign = jnp.sign(a)
        held = sign * jnp.minimum(sign * gap, sign * jnp.clip(gap, -low, high))
        product = jnp.prod(jnp.where(mask, jnp.exp(held), 1.0), axis=1, keepdims=True)
        return jnp.broadcast_to(-a * product ** (1 / jnp.maximum(mask.sum(1, keepdims=True), 1)), gap.shape)
    if loss_mode in ("dppo_tv", "dppo_kl"):
        new, before = jnp.exp(jax.lax.stop_gradient(logps)), jnp.exp(jax.lax.stop_gradient(logps - gap))
        if loss_mode == "dppo_tv":
            rises, falls = new - before > high, before - new > low
        else:
            kl = before * jnp.log(before / new) + (1 - before) * jnp.log((1 - before) / (1 - new))
            rises, falls = (kl > high) & (new > before), (kl > low) & (new < before)
        return -a * jax.lax.stop_gradient(ratio) * logps * (1 - jnp.where(a > 0, rises, falls))
    return -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - low, 1 + high) * a)


def plain_gradient(
    params,
    model,
    found,
    advantages,
    old,
    reference,
    *,
    mode: str,
    low: float,
    high: float,
    kl_coef: float,
    entropy_coef: float,
    max_tokens: int,
    temperature: float = 1.0,
    loss_mode: str = "vanilla",
):
    """The gradient of the whole batch's loss as the papers write it: policy loss + k3 + entropy, each sequence by itself.

    Every aggregation is linear in the sums of the sequences. So the weight of a sequence is the aggregation's value where
    that sum is 1 and all others are 0. The gradient is compiled once for all sequences."""
    tokens, mask, members = unpacked(found)
    wide = jax.tree.leaves(params)[0].dtype
    a = np.array([advantages[g][i] for g, i in members])[:, None].astype(wide)
    kept = [n for n in range(len(members)) if mask[n].any()]
    shares = np.zeros(len(members), wide)
    for n in kept:
        shares[n] = aggregated([float(n == k) for k in kept], kept, mask, members, mode, max_tokens)
    before, ref = (
        None if p is None else _scores(p, tokens, model=model, temperature=temperature)[0] for p in (old, reference)
    )
    return _gradient(
        params,
        tokens,
        mask,
        a,
        before,
        ref,
        shares,
        model=model,
        temperature=temperature,
        low=low,
        high=high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        loss_mode=loss_mode,
    )


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def _scores(params, tokens, *, model, temperature):
    return plain_scores(params, model, tokens, temperature)


@functools.partial(
    jax.jit, static_argnames=("model", "temperature", "low", "high", "kl_coef", "entropy_coef", "loss_mode")
)
@jax.grad
def _gradient(
    params, tokens, mask, a, old, reference, shares, *, model, temperature, low, high, kl_coef, entropy_coef, loss_mode
):
    logps, entropies = plain_scores(params, model, tokens, temperature)
    losses = plain_policy_loss(loss_mode, logps, logps - old, mask, a, low, high)
    if reference is not None:
        d = reference - logps
        losses = losses + kl_coef * (jnp.exp(d) - 1 - d)
    losses = losses - entropy_coef * entropies
    return jnp.sum(shares * jnp.sum(jnp.where(mask, losses, 0), axis=1))


def aggregated(sums, kept, mask, members, mode: str, max_tokens: int) -> float:
    """The loss of the batch from the sums of its sequences `kept`, each mode with its own division."""
    if mode == "token-mean":
        return sum(sums) / mask.sum()
    if mode == "seq-mean-token-mean":
        return sum(s / mask[n].sum() for s, n in zip(sums, kept, strict=True)) / len(kept)
    if mode == "prompt-mean":
        prompts = sorted({members[n][0] for n in kept})
        of = {g: [i for i, n in enumerate(kept) if members[n][0] == g] for g in prompts}
        means = [sum(sums[i] for i in of[g]) / sum(mask[kept[i]].sum() for i in of[g]) for g in prompts]
        return sum(means) / len(means)
    return sum(sums) / (len(kept) * (max_tokens if mode == "seq-mean-token-sum-norm" else 1))


def distances(a, b) -> dict[str, float]:
    """Per leaf: 2-norm of the difference over 2-norm of `b`."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    return {
        jax.tree_util.keystr(path): float(
            np.linalg.norm(np.asarray(x, float) - np.asarray(y, float))
            / max(np.linalg.norm(np.asarray(y, float)), 1e-300)
        )
        for (path, x), y in pairs
    }
