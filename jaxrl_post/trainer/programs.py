"""The learner's device programs: score, accumulate, measure, commit. Pure functions of (weights, sums, batch).

A policy is a tree of weights that are all trained, or a lora.Adapted with a frozen base. Gradients, sums, moments and the
state are trees like its trained weights.

Invariant: `Sums` holds plain sums over micro-batches and devices (the compiler adds over devices). One division by
`count` gives the loss of the whole batch and its gradient. No micro-batch is ever divided by its own count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_post.algorithms import distillation, divergence, logprobs, losses
from jaxrl_post.algorithms.correction import off_policy
from jaxrl_post.algorithms.kl_estimators import KL_ESTIMATORS
from jaxrl_post.algorithms.logprobs import log_ratio
from jaxrl_post.config import AlgorithmConfig, BatchConfig, OptimizerConfig, on
from jaxrl_post.kernels import branches, choice, hardware
from jaxrl_post.models import decoder, experts, layer_loop, lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import row_pieces, weight_sync
from jaxrl_post.trainer import attention, embedding, recurrence, routing, split_head
from jaxrl_post.trainer.optimizer import Optimizer
from jaxrl_post.trainer.packing import Batch
from jaxrl_post.trainer.routing import Routed
from jaxrl_post.trainer.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings that are fixed in a run.

    - head_chunk: tokens whose logits exist at once
    - loop: the form of the loop over layers
    - split: the head is split over fsdp x tensor, where that is more than one device
    - sums: dtype of the gradient sums; float32 stands for that of the weights
    - embed: rows of the embedding with a gradient of their own (trainer/embedding.py), or None for XLA's
    - attention: the device's kernel for packed rows (trainer/attention.py), or None for the jnp form
    - context: devices that share a row (row_pieces.RowPieces)
    - teacher: the recipe of the teacher that the loss compares with, or None
    """

    model: decoder.ModelConfig
    algorithm: AlgorithmConfig
    temperature: float
    head_chunk: int
    dtype: Any
    loop: layer_loop.LayerLoop
    split: bool
    sums: Any
    mesh: Mesh
    embed: Callable | None = None
    attention: Callable | None = None
    context: int = 1
    teacher: Recipe | None = None

    @property
    def rows(self) -> row_pieces.RowPieces:
        return row_pieces.RowPieces(self.mesh, self.context)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """Returns which layers are one array of sums for each name: those that are scanned together. None are unless scanned."""
        return decoder.groups(self.model) if self.loop.scan else []


def recipe(
    model: decoder.ModelConfig,
    algorithm: AlgorithmConfig,
    optimizer: OptimizerConfig,
    batch: BatchConfig,
    mesh: Mesh,
    *,
    temperature: float,
    remat: str | None,
    scan_layers: str,
    dtype: str,
    attention: Callable | None,
    context: int = 1,
) -> Recipe:
    """Returns the recipe of a run on `mesh`. Temperature 0 stands for 1, as in the engine's log-probs."""
    platform = mesh.devices.flat[0].platform
    placed = platform == "tpu" and meshes.vocab_shards(mesh) > 1  # whole weights would take more temporaries
    loop = layer_loop.LayerLoop(
        scan=on(scan_layers, platform),
        row_major=platform in hardware.GPU,
        # With additions, pairs that are not placed take more seconds to compile.
        paired=platform == "tpu" and (placed or model.lora is None),
        placed=placed,
        policy=remat,
    )
    return Recipe(
        model=model,
        algorithm=algorithm,
        temperature=temperature or 1.0,
        head_chunk=batch.head_chunk,
        dtype=jnp.dtype(dtype),
        loop=loop,
        split=on(batch.split_head, platform),
        sums=jnp.dtype(optimizer.sums_dtype),
        mesh=mesh,
        embed=embedding.for_platform(mesh),
        attention=attention,
        context=context,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums since the last commit.

    - grads: of the loss's numerator, a tree like the trained weights. Of layers that are scanned, "layers" holds a tree for each
      stack, with leaves [L, ...] (layer_loop.stacked). A step then adds one array for each, however many layers there are.
    - count: the divisor of the loss, by the aggregation
    - tokens: trained tokens
    - by_count, by_token: metrics to be divided by `count` and by `tokens`
    """

    grads: Any
    count: Any
    tokens: Any
    by_count: dict[str, Any]
    by_token: dict[str, Any]


def score(policy: Any, batch: Batch, recipe: Recipe) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns log-prob and entropy of every token, stored at the token, given the earlier tokens of its segment.

    The first token of a row gets 0. The first token of a later segment is computed from the last token of the segment
    before. Neither value has a meaning, and no mask is ever set there.

    Of a reward model it returns the reward of the segment up to and with every token, and zeros.
    """
    return routed_score(policy, batch, recipe)[:2]


def routed_score(policy: Any, batch: Batch, recipe: Recipe) -> tuple[Any, Any, Routed | None]:
    """Returns what `score` does, and what the layers with experts found, shaped and shifted like it."""
    policy = lora.whole(policy)
    h, routed = routed_hidden(policy, recipe.model, batch, recipe)
    if recipe.model.scalar:
        found = recipe.rows.joined(decoder.rewards(policy, h))
        return found, jnp.zeros_like(found), routed
    with jax.named_scope("logprobs"):
        results = logprobs_and_entropy(policy, h, _targets(batch, recipe), recipe, _following(batch.kept, recipe))
        return *(_at_next(recipe.rows.joined(x)) for x in results), jax.tree.map(_at_next, routed)


def _targets(batch: Batch, recipe: Recipe) -> jax.Array:
    """Returns, at each token, the next one of its row, in pieces."""
    return recipe.rows.cut(jnp.roll(batch.tokens, -1, axis=1))


def _at_next(x: Array) -> Array:
    """Returns values of tokens [B, T] at the tokens that follow them."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


def hidden(params: Any, model: decoder.ModelConfig, batch: Batch, recipe: Recipe) -> Float[Array, "B T D"]:
    """Returns the last layer's normed output of each token. B and T are those of pieces of rows (Recipe.rows)."""
    return routed_hidden(params, model, batch, recipe)[0]


def routed_hidden(
    params: Any, model: decoder.ModelConfig, batch: Batch, recipe: Recipe
) -> tuple[Float[Array, "B T D"], Routed | None]:
    """Returns `hidden`, and what the layers with experts found at each token, of whole rows."""
    cut = recipe.rows.cut
    tokens, positions = cut(batch.tokens), cut(batch.positions)
    B, T = tokens.shape
    ways, start = experts.ALONE, None
    if model.experts is not None:
        recorded = _following(batch.routes, recipe) if model == recipe.model else None
        ways = routing.of_batch(model, recipe.rows, batch.segment_ids, recorded, recipe.algorithm.router_replay)
        start = Routed.zeros(B * T, jnp.promote_types(recipe.dtype, jnp.float32))
    heads = meshes.heads_sharding(recipe.mesh)
    attend = attention.packed(jax.tree.map(cut, _texts(batch, recipe)), heads, recipe.attention, recipe.context)
    noise, rule = None, choice.of_delta_rule(recipe.mesh.devices.flat[0])
    if batch.noise_scales is not None:
        made = embedding.noise(cut(batch.noise_keys), positions, cut(batch.noise_scales), model.embed)
        noise = made.reshape(B * T, model.embed)
    # Tokens are flattened to one axis. With [B, T] the weight gradients contract two axes, and XLA:CPU then transposes
    # a copy of every activation.
    h, routed = decoder.hidden(
        params,
        model,
        tokens.reshape(B * T),
        positions.reshape(B * T),
        attend,
        start,
        noise=noise,
        dtype=recipe.dtype,
        loop=recipe.loop,
        rows=recipe.embed,
        routing=ways,
        recur=recurrence.packed(cut(batch.segment_ids), heads, rule, recipe.context),
    )
    h = jax.lax.with_sharding_constraint(h.reshape(B, T, -1), meshes.batch_sharding(recipe.mesh))
    return h, jax.tree.map(lambda x: recipe.rows.joined(x.reshape(B, T)), routed)


def _texts(batch: Batch, recipe: Recipe) -> attention.Texts:
    """Returns the segments of rows, or their branches where they have some or lie in pieces."""
    if batch.until is not None:
        return branches.of_rows(batch.until, batch.positions)
    return branches.of_segments(batch.segment_ids, batch.positions) if recipe.context > 1 else batch.segment_ids


def logprobs_and_entropy(
    policy: Any, h: jax.Array, following: jax.Array, recipe: Recipe, kept: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    how = dict(temperature=recipe.temperature, chunk=recipe.head_chunk, kept=kept)
    if recipe.split and split_head.serves(recipe.mesh):
        return split_head.chosen(policy, recipe.model, h, following, mesh=recipe.mesh, **how)
    return logprobs.chosen(_head(policy, recipe.model), h, following, **how)


def _following(records: jax.Array | None, recipe: Recipe) -> jax.Array | None:
    """Returns, at each token, the record of the next one, in pieces, if the run has such records."""
    return None if records is None else recipe.rows.cut(jnp.roll(records, -1, axis=1))


def _head(params: Any, model: decoder.ModelConfig) -> Callable:
    """Returns a function from the last layer's output, [B, C, D], to logits [B, C, V]."""

    def head(piece):
        b, c, d = piece.shape
        return decoder.logits(params, model, piece.reshape(b * c, d)).reshape(b, c, -1)

    return head


def score_norms(policy: Any, batch: Batch, recipe: Recipe) -> Float[Array, "B T"]:
    """Returns the squared norm of the score of every token (logprobs.score_norms), stored at the token.

    The first token of a row and of a segment is as in `score`.
    """
    policy = lora.whole(policy)
    h = hidden(policy, recipe.model, batch, recipe)
    how = dict(temperature=recipe.temperature, chunk=recipe.head_chunk, kept=_following(batch.kept, recipe))
    how["statistics"] = logprobs.score_norms
    (norms,) = logprobs.chosen(_head(policy, recipe.model), h, _targets(batch, recipe), **how)
    return _at_next(recipe.rows.joined(norms))


def compared(policy: Any, teacher: Any, batch: Batch, recipe: Recipe) -> divergence.TokenDivergence:
    """Returns what `score` does, the divergence from the teacher and the reverse KL, at every token."""
    policy, their = lora.whole(policy), recipe.teacher
    assert their is not None
    pairs = (policy, recipe), (teacher, their)
    outputs = tuple(hidden(params, own.model, batch, own) for params, own in pairs)
    with jax.named_scope("divergence"):
        results = divergence.of_hidden(
            tuple(_head(params, own.model) for params, own in pairs),
            outputs,
            _targets(batch, recipe),
            temperature=recipe.temperature,
            beta=recipe.algorithm.gkd_beta,
            used=recipe.model.used_vocab or recipe.model.vocab_size,
            chunk=recipe.head_chunk,
        )
        return tuple(_at_next(recipe.rows.joined(x)) for x in results)


def _scored(policy: Any, teacher: Any, batch: Batch, recipe: Recipe) -> tuple[Any, Any, Any, dict[str, Any], Any]:
    """Returns log-probs, entropies, what stands for advantages in the loss, further metrics by token, and Routed if any."""
    if recipe.teacher is None:
        if recipe.model.experts is None:
            return *score(policy, batch, recipe), batch.advantages, {}, None
        logps, entropies, routed = routed_score(policy, batch, recipe)
        return logps, entropies, batch.advantages, {}, routed
    *own, gains, reverse = compared(policy, teacher, batch, recipe)
    return *own, gains, {distillation.REVERSE_KL: reverse}, None


def numerator(
    policy: Any, batch: Batch, recipe: Recipe, at_start: Any = False, teacher: Any = None
) -> tuple[Float[Array, ""], tuple[Sums, Float[Array, "B T"]]]:
    """Returns the undivided loss of a micro-batch, its sums without a gradient, and its log-probs.

    With `at_start`, a bool scalar, `policy` is the old policy itself: its log-probs replace batch.old_logprobs. `teacher`:
    the weights of recipe.teacher, where there is one.

    With prox_weights, old log-probs lie between batch.old_logprobs (then the engine's) and the policy's. With
    algorithm.rollout_is "token", pi_old / mu is then applied here as a weight (decoupled PPO, arXiv 2505.24298,
    equation 5, approximated).
    """
    algorithm, mask, old = recipe.algorithm, batch.loss_mask, batch.old_logprobs
    logps, entropies, gains, told, routed = _scored(policy, teacher, batch, recipe)
    if old is not None:
        old = jnp.where(at_start, jax.lax.stop_gradient(logps), old)
    if batch.prox_weights is not None:
        old = old + batch.prox_weights * (jax.lax.stop_gradient(logps) - old)
    with jax.named_scope("loss"):
        per_token, kept, indicators = _policy_loss(logps, old, gains, batch, algorithm)

        def weighed(values):
            return jnp.sum(jnp.where(kept, batch.loss_weights * values, 0.0))

        def token_sum(values):
            return jnp.sum(jnp.where(mask, values, 0.0))

        total = weighed(per_token)
        by_count = {"actor/pg_loss": total}
        told |= indicators if recipe.model.scalar else {"actor/entropy": entropies, **indicators}
        if batch.kept is not None:
            told["training/unrecorded_kept_ids"] = (batch.kept[..., 0] < 0).astype(logps.dtype)
        if routed is not None:
            told |= routing.metrics(routed, recipe.model)
            terms = routing.losses(routed, recipe.model, algorithm)
            by_count |= {name: weighed(values) for name, (_, values) in terms.items()}
            total = total + sum(coef * by_count[name] for name, (coef, _) in terms.items())
        by_token = {name: token_sum(values) for name, values in told.items()}
        if old is not None:
            by_token["actor/ppo_kl"] = token_sum(-log_ratio(logps, old))
        if batch.positives is not None:
            by_count["actor/nll_loss"] = weighed(-batch.positives * logps)
            total = total + algorithm.positive_nll_coef * by_count["actor/nll_loss"]
        if batch.ref_logprobs is not None:
            drift = KL_ESTIMATORS[algorithm.kl_loss_type](logps, batch.ref_logprobs)
            if algorithm.use_bias_correction_kl:
                drift = drift * jnp.exp(log_ratio(logps, old))
            kl = weighed(drift)
            by_count["actor/kl_loss"] = kl
            total = total + algorithm.kl_loss_coef * kl
        if algorithm.entropy_coef > 0:
            total = total - algorithm.entropy_coef * weighed(entropies)
    return total, (counted(batch, by_count, by_token), logps)


def counted(batch: Batch, by_count: dict[str, Any], by_token: dict[str, Any]) -> Sums:
    """Returns the sums of a micro-batch without a gradient."""
    count, tokens = (jnp.sum(x, dtype=jnp.int32) for x in (batch.loss_counts, batch.loss_mask))
    return Sums(grads=None, count=count, tokens=tokens, by_count=by_count, by_token=by_token)


def _policy_loss(
    logps: jax.Array, old: jax.Array | None, gains: jax.Array, batch: Batch, algorithm: AlgorithmConfig
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the policy loss of every token, which tokens stay in the numerators, and indicators by metric name."""
    kept = mask = batch.loss_mask
    terms = losses.Terms(logps, old, gains, mask, batch.segment_ids, algorithm)
    per_token, indicators = losses.LOSSES[algorithm.loss_mode](terms)
    if batch.held is not None:
        per_token = per_token + algorithm.ppo_kl_coef * batch.held * jnp.abs(log_ratio(logps, old))
    if algorithm.opsm_delta > 0:
        left = off_policy(logps, old, batch.advantages, mask, batch.segment_ids, algorithm.opsm_delta)
        per_token = jnp.where(left, 0.0, per_token)
        indicators = {**indicators, "actor/opsm_masked": left.astype(per_token.dtype)}
    if batch.corrections is not None:
        per_token, kept = per_token * batch.corrections, mask & (batch.corrections > 0)
    if batch.prox_weights is not None and algorithm.rollout_is == "token":
        ratio = jnp.exp(log_ratio(old, batch.rollout_logprobs))
        weight = jnp.minimum(ratio, algorithm.rollout_is_threshold[0])
        per_token, indicators = per_token * weight, {**indicators, "rollout_corr/rollout_is_mean": weight}
    return per_token, kept, indicators


def empty(policy: Any, batch: Batch, recipe: Recipe, *teacher: Any) -> Sums:
    """Returns zeros of the shape that `accumulate` adds to. Arguments are arrays or ShapeDtypeStructs.

    A gradient is a tree like the trained weights, so the forward pass alone says all shapes.
    """

    def sums(policy: Any, batch: Batch, *teacher: Any) -> Sums:
        _, (found, _) = numerator(policy, batch, recipe, False, *teacher)
        return replace(found, grads=in_sums(lora.trained(policy), recipe))

    return zeros(jax.eval_shape(sums, policy, batch, *teacher), recipe)


def zeros(shapes: Sums, recipe: Recipe) -> Sums:
    """Returns zeros of these shapes. Gradients have the dtype in which they are summed."""
    if recipe.sums != jnp.float32:
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, recipe.sums), shapes.grads)
        shapes = replace(shapes, grads=grads)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def accumulate(
    policy: Any, sums: Sums, batch: Batch, recipe: Recipe, at_start: Any, *teacher: Any
) -> tuple[Sums, Float[Array, "B T"]]:
    """Returns `sums` plus one micro-batch, and the log-probs of its tokens. `at_start`, `teacher`: as in `numerator`."""
    added, logps = _slope(policy, batch, recipe, at_start, *teacher)
    return plus(sums, added), logps


def plus(sums: Any, added: Any) -> Any:
    return jax.tree.map(lambda total, one: (total + one).astype(total.dtype), sums, added)


def _slope(policy: Any, batch: Batch, recipe: Recipe, at_start: Any, *teacher: Any) -> tuple[Sums, Any]:
    """Returns the sums of a micro-batch, and its log-probs."""

    def loss(weights: Any) -> tuple[Any, tuple]:
        return numerator(lora.with_trained(policy, weights), batch, recipe, at_start, *teacher)

    grads, (sums, logps) = jax.grad(loss, has_aux=True)(lora.trained(policy))
    return replace(sums, grads=in_sums(grads, recipe)), logps


def in_sums(grads: Any, recipe: Recipe) -> Any:
    """Returns a gradient by trained weights in the form of Sums.grads."""
    stacks = recipe.stacks
    return grads | {"layers": layer_loop.stacked(grads["layers"], stacks)} if stacks else grads


def measure(policy: Any, sums: Sums, batch: Batch, recipe: Recipe, at_start: Any) -> tuple[Sums, Float[Array, "B T"]]:
    """Does the same as `accumulate` for a micro-batch whose gradient is 0: a forward pass alone."""
    _, (added, logps) = numerator(policy, batch, recipe, at_start)
    return replace(plus(replace(sums, grads=None), added), grads=sums.grads), logps


def divided(sums: Sums, recipe: Recipe) -> Any:
    """Returns the gradient of the loss, a tree like the trained weights, or zeros where nothing was counted."""
    return mean(by_layer(sums.grads, recipe), sums.count)


def mean(grads: Any, count: Any) -> Any:
    """Returns `grads` divided by `count`, or by 1 where it is 0, in float32 or wider."""
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    return jax.tree.map(lambda g: g / jnp.maximum(count, 1).astype(g.dtype), wide)


def by_layer(grads: Any, recipe: Recipe) -> Any:
    """Returns a tree like the params from one in the form of Sums.grads.

    A barrier keeps each layer's slices apart from what uses them. Else XLA fuses several layers into one kernel. A
    TPU's compiler then needs more than twice the seconds for the optimizer step.
    """
    stacks = recipe.stacks
    if not stacks:
        return grads
    layers = layer_loop.unstacked(grads["layers"], stacks)
    return grads | {"layers": {name: jax.lax.optimization_barrier(layer) for name, layer in layers.items()}}


def commit(
    state: TrainState, sums: Sums, recipe: Recipe, optimizer: Optimizer
) -> tuple[TrainState, Sums, Any, dict[str, jax.Array]]:
    """Takes one optimizer step. Returns the new state, emptied sums, whether all trained weights are finite, and metrics.

    Whether they are finite is said here, because this program has the weights at hand. A later one would read them again.

    The update is skipped where the gradient is not finite or nothing was counted. Weights and moments then keep every
    bit, and the step still counts. "training/skip_reason" says why: 0 not skipped,
    1 no token was counted, 2 the gradient is not finite.
    """
    with jax.named_scope("commit"):
        norm = gradient_norm(sums)
        sound = jnp.isfinite(norm) & (sums.count > 0)
        grads, moves = divided(sums, recipe), sound & (state.step >= optimizer.first)
        policy, moments, lr = stepped(
            state.params["policy"], state.opt_state, grads, norm, moves, state.step, optimizer
        )
        after = TrainState(params={**state.params, "policy": policy}, opt_state=moments, step=state.step + 1)
        metrics = means(sums) | {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "training/skipped_updates": 1 - sound.astype(jnp.int32),
            "training/skip_reason": jnp.where(sums.count > 0, jnp.where(sound, 0, 2), 1),
            "training/trained_tokens": sums.tokens,
        }
        return after, jax.tree.map(jnp.zeros_like, sums), weight_sync.all_finite(policy), metrics


def gradient_norm(sums: Sums) -> Float[Array, ""]:
    """Returns the 2-norm of the divided gradient. Of stacked sums: one reduction for each name, not for each layer."""
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(mean(sums.grads, sums.count))))


def stepped(
    weights: Any, opt_state: Any, grads: Any, norm: Any, moves: Any, step: Any, optimizer: Optimizer
) -> tuple[Any, Any, Any]:
    """Returns weights and optimizer's state after one step, and its rate. Where not `moves`, both keep every bit."""
    updates, moments = optimizer.transform.update(optimizer.clip(grads, norm), opt_state, weights)
    lr = optimizer.rate(step)
    moved = jax.tree.map(lambda p, u: (p - lr * u).astype(p.dtype), weights, updates)

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(moves, a, b), new, old)

    return keep(moved, weights), keep(moments, opt_state), lr


def means(sums: Sums) -> dict[str, jax.Array]:
    out = {name: value / jnp.maximum(sums.count, 1).astype(value.dtype) for name, value in sums.by_count.items()}
    return out | {
        name: value / jnp.maximum(sums.tokens, 1).astype(value.dtype) for name, value in sums.by_token.items()
    }
