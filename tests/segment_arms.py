"""Packed rows of many segments: log-probs beside those of transformers on each segment alone, gradients beside float64.

A segment is a text of tests/goldens or the beginning of one. Its log-probs are those of the text: transformers' scores
at a token depend on no later token. The trainer's arms run its own program over rows. The engine's arm runs steps of
rows over pages and states, some rows drafted and rejected. Slots and pages are used again by a later segment.

A fault is planted by a changed config, by changed weights, or by a changed function (tests/parity_arms.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import expert_arms
import jax
import jax.numpy as jnp
import numpy as np
import parity_arms as arms
from parity_arms import Computed

from jaxrl_post.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from jaxrl_post.engine import recurrent_rows
from jaxrl_post.engine.row_state import Program
from jaxrl_post.kernels import attention as pages
from jaxrl_post.models import cache_kinds, decoder, experts, gated_delta, hf, layer, layer_loop
from jaxrl_post.parallel import mesh
from jaxrl_post.trainer import attention, packing, programs

# By row. Some are shorter than the convolution, some longer than a window, and some begin in one chunk and end in another.
LENGTHS = ((40, 2, 33, 1, 38, 3), (27, 40, 5, 17, 3, 12))
TOKENS = 120  # of a row; what is left is padding
SLOTS, DRAFTED, PAGE = 4, 2, 16


class Segment(NamedTuple):
    """Where a segment lies, and the golden text of which it is the beginning."""

    row: int
    start: int
    length: int
    text: int


def segments(family: str) -> list[Segment]:
    texts, out = len(arms.golden(family)[0]), []
    for row, lengths in enumerate(LENGTHS):
        for length, start in zip(lengths, np.cumsum((0, *lengths))):
            out.append(Segment(row, int(start), length, len(out) % texts))
    return out


def theirs(family: str) -> np.ndarray:
    """Transformers' log-probs of each token but the first of each segment, one segment after another, in nats."""
    tokens, scores = arms.golden(family)
    every = np.asarray(expert_arms.of_next(jnp.asarray(scores), tokens))
    return np.concatenate([every[one.text, : one.length - 1] for one in segments(family)])


# ---- the trainer's program


def batch(family: str) -> packing.Batch:
    tokens, shape = arms.golden(family)[0], (len(LENGTHS), TOKENS)
    made, positions, ids = (np.zeros(shape, np.int32) for _ in range(3))
    number = [0] * len(LENGTHS)
    for row, start, length, text in segments(family):
        number[row] += 1
        own = slice(start, start + length)
        made[row, own], positions[row, own], ids[row, own] = tokens[text, :length], np.arange(length), number[row]
    empty = np.zeros(shape, np.float32)
    return packing.Batch(
        tokens=made, positions=positions, segment_ids=ids, loss_mask=ids > 0, loss_weights=empty, loss_counts=ids,
        advantages=empty, rollout_logprobs=empty,
    )  # fmt: skip


def trainer(config, params: dict, family: str, scan: str = "no") -> jax.Array:
    """As `theirs`, by the learner's own program. scan: "yes" scans layers and computes them again in the backward pass."""
    recipe = programs.recipe(
        config, AlgorithmConfig(), OptimizerConfig(), BatchConfig(), mesh.make_mesh(devices=jax.devices()[:1]),
        temperature=1.0, remat="full" if scan == "yes" else None, scan_layers=scan, dtype="float32", attention=None,
    )  # fmt: skip
    found, _ = programs.score(params, batch(family), recipe)
    return jnp.concatenate([found[row, start + 1 : start + length] for row, start, length, _ in segments(family)])


# ---- the engine's rows


class Step(NamedTuple):
    """Rows of one step, slot by slot. `kept`: of each row that stands, its place among all tokens; else -1."""

    tokens: np.ndarray
    slot: np.ndarray
    position: np.ndarray
    real: np.ndarray
    begins: np.ndarray  # the position of each slot's first row
    count: np.ndarray
    settled: np.ndarray
    kept: np.ndarray


def steps(family: str) -> Iterator[Step]:
    """Each slot has its own segments, one after another. Its settled rows, drafted rows and rejections follow its turns."""
    tokens, every = arms.golden(family)[0], segments(family)
    firsts = np.cumsum([0, *(one.length for one in every)])
    waiting = [list(range(slot, len(every), SLOTS)) for slot in range(SLOTS)]
    at, turn, rows = [0] * SLOTS, 0, SLOTS * (3 + DRAFTED)
    while any(waiting):
        made = {name: np.zeros(rows, np.int32) for name in ("tokens", "slot", "position")}
        made["slot"] += SLOTS - 1
        kept, sizes, filled = np.full(rows, -1), np.zeros((3, SLOTS), np.int32), 0
        for slot in range(SLOTS):
            if not waiting[slot] or (turn + slot) % 5 == 4:  # a slot may have no row in a step
                continue
            one, start = every[waiting[slot][0]], at[slot]
            settled = min(1 + (turn + slot) % 3, one.length - start)
            drafted = min((turn + 2 * slot) % (DRAFTED + 1), one.length - start - settled)
            stands = settled + min(drafted, (turn + slot) % 2)
            for row in range(settled + drafted):
                right = tokens[one.text, start + row]
                made["tokens"][filled] = right if row < stands else (right + 1) % 64
                made["slot"][filled], made["position"][filled] = slot, start + row
                kept[filled] = firsts[waiting[slot][0]] + start + row if row < stands else -1
                filled += 1
            sizes[:, slot] = start, settled + drafted, settled
            at[slot] += stands
            if at[slot] == one.length:
                waiting[slot].pop(0)
                at[slot] = 0
        yield Step(**made, real=np.arange(rows) < filled, begins=sizes[0], count=sizes[1], settled=sizes[2], kept=kept)
        turn += 1


def engine(config, params: dict, family: str) -> np.ndarray:
    """As `theirs`, over the engine's caches."""
    program = Program(
        config=config, dtype=jnp.float32, spread=lambda run: run, spread_states=lambda run: run, platforms=frozenset()
    )
    tokens, every = arms.golden(family)[0], segments(family)
    blocks = -(-tokens.shape[1] // PAGE)
    table = jnp.arange(SLOTS * blocks)[::-1].reshape(SLOTS, blocks)

    def blank(one: Any) -> Any:
        if isinstance(one, cache_kinds.Pages):
            return pages.empty(SLOTS * blocks, PAGE, one.kv_heads, one.head_dim, jnp.float32)
        return recurrent_rows.empty(SLOTS, DRAFTED, one, jnp.float32)

    @jax.jit
    def run(params, cache, step):
        at = pages.Rows(step.slot, step.position, step.real, table)
        by_slot = recurrent_rows.slot_rows(step.begins, step.count, step.settled)
        calls = dict(attend=program.attending(at, pages.attention), recur=program.recurring(by_slot, step.slot))
        h, cache = decoder.hidden(params, config, step.tokens, step.position, cache=cache, **calls)
        return decoder.logits(params, config, h), cache

    cache = tuple(blank(one) for one in config.kept if one.of is None)
    scores = np.zeros((sum(one.length for one in every), config.vocab_size), np.float32)
    for step in steps(family):
        found, cache = run(params, cache, jax.tree.map(jnp.asarray, step))
        scores[step.kept[step.kept >= 0]] = np.asarray(found)[step.kept >= 0]
    parts = np.split(scores, np.cumsum([one.length for one in every])[:-1])
    each = zip(parts, every, strict=True)
    own = [expert_arms.of_next(part[None], tokens[None, one.text, : one.length])[0] for part, one in each]
    return np.concatenate(own)


def in_chunks(size: int) -> Computed:
    """The trainer's rule with chunks of so many tokens. It is no fault."""
    return Computed(gated_delta, "packed", lambda right, tokens, ids: right(tokens, ids, size))


def gap(family: str, arm: str = "trainer", change: Any = None) -> float:
    """Largest absolute difference of our log-probs from transformers', in nats. change: what is planted, or None."""
    config, params = hf.load(arms.GOLDENS / family)
    computed = isinstance(change, Computed)
    config, params = (config, params) if change is None or computed else change(config, params)
    with arms.wronged(change) if computed else contextlib.nullcontext():
        if arm == "engine":
            found = engine(config, params, family)
        else:
            scan = "yes" if arm == "scanned" else "no"
            found = jax.jit(lambda params: trainer(config, params, family, scan))(params)
    return float(np.abs(np.asarray(found) - theirs(family)).max())


def gradients(family: str, fault: Computed | None = None) -> dict[str, float]:
    """expert_arms.by_leaf of the sum of all log-probs of the packed rows, at the weights of `calm`."""
    config, params = calm(family)
    return expert_arms.by_leaf(lambda params: trainer(config, params, family).sum(), params, _exact(family), fault)


@functools.cache
def calm(family: str) -> tuple[Any, dict]:
    """The family's config with random weights at which rounding does not grow from layer to layer.

    At the golden weights float32 alone moves a leaf by up to 3e-4 of its largest number, in the plain form too: scores of
    attention and branches of the stream are large there. Here matrices are drawn as at the start of a training, and no
    norm or bias is at rest. Where scores are not scaled, the norm of queries scales them. Norms that write to the stream
    are divided as such matrices are, by sqrt(2 L). Routers are the golden ones, whose scores lie far apart. What a norm
    divides by its length may be nearly 0: what a token reads of a state where its query hardly meets a key, and embeddings
    of a layer. So norms add 1e-2 under their roots. With 1e-5, the plain form in float32 is as far off.
    """
    config, golden = hf.load(arms.GOLDENS / family)
    config = dataclasses.replace(config, norm_eps=1e-2)
    noise = np.random.default_rng(0)

    def leaf(path, drawn, stored):
        name = path[-1].key
        if name.startswith("router"):
            return np.asarray(stored)
        if drawn.ndim > 1:
            return drawn
        drawn = drawn + 0.1 * noise.standard_normal(drawn.shape, np.float32)
        if name == "q_norm" and config.query_scale == 1:
            return drawn * np.float32(drawn.size**-0.5)
        return drawn * np.float32((2 * config.layers) ** -0.5) if name.endswith("post_norm") else drawn

    return config, jax.tree_util.tree_map_with_path(leaf, decoder.init(config, 1), golden)


def margin(family: str) -> float:
    """The smallest difference of a chosen expert's score from one that is not chosen, at the weights of `calm`."""
    return expert_arms.choices(*calm(family), arms.golden(family)[0])[1]


@functools.cache
def _exact(family: str) -> dict:
    """The gradient of each segment alone, in float64. Each is filled up to one length, which changes no token before."""
    tokens, every = arms.golden(family)[0], segments(family)
    counted = np.array([np.arange(1, tokens.shape[1]) < one.length for one in every])
    return expert_arms.exact(*calm(family), tokens[[one.text for one in every]], counted)


def changed_by_export(family: str) -> int:
    """How many leaves of a golden checkpoint have other numbers, once saved and opened again."""
    config, params = hf.load(arms.GOLDENS / family)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(f"{folder}/model", config, params)
        again, opened = hf.load(f"{folder}/model")
    assert again == config
    return sum(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(opened), strict=True))


# ---- Planted faults


def stopped(module: Any, name: str, place: int | str) -> Computed:
    """One argument of a function without a gradient, or one field of its first argument."""

    def wrong(right: Callable, *given, **more):
        given = list(given)
        if isinstance(place, str):
            given[0] = given[0]._replace(**{place: jax.lax.stop_gradient(getattr(given[0], place))})
        else:
            given[place] = jax.lax.stop_gradient(given[place])
        return right(*given, **more)

    return Computed(module, name, wrong)


def one_segment(module: Any, name: str, place: int) -> Computed:
    """A function that takes a row for one segment."""

    def wrong(right: Callable, *given):
        given = list(given)
        given[place] = jnp.ones_like(given[place])
        return right(*given)

    return Computed(module, name, wrong)


def decays_afterwards(right: Callable, state, token):
    """The rule whose state decays behind the update."""
    undecayed = token._replace(g=jnp.zeros_like(token.g))
    after, _ = right(state, undecayed)
    after = after * jnp.exp(token.g)[..., None, None]
    return after, jnp.einsum("...hkv,...hk->...hv", after, token.q)


def decays_afterwards_in_chunks(right: Callable, tokens, ids):
    """The same: the state before a token's decay has that of the token before, and what is read has its own too."""
    earlier = jnp.pad(tokens.g[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return right(tokens._replace(g=earlier), ids) * jnp.exp(tokens.g)[..., None]


def of_other_slots(name: str) -> Callable:
    """Each slot with what its neighbour keeps."""
    return lambda right, cache, *given: right(
        cache._replace(**{name: jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), getattr(cache, name))}), *given
    )


def not_cleared(right: Callable, cache, rows, *given):
    """A slot that begins goes on with what another segment left there."""
    at = jnp.where((rows.position == 0) & (rows.count > 0), jnp.maximum(cache.start, 1), rows.position)
    return right(
        cache._replace(start=jnp.where(rows.position == 0, at, cache.start)), rows._replace(position=at), *given
    )


def keys_of_any_length(right: Callable, convolved, g, beta):
    made = right(convolved, g, beta)
    k = jnp.repeat(jax.nn.silu(convolved.k), made.k.shape[-2] // convolved.k.shape[-2], axis=-2)
    return made._replace(k=k * convolved.k.shape[-1] ** -0.5)


def values_of_normed_keys(right: Callable) -> Callable:
    """Values that are keys, taken behind the keys' norm: the norm of values gets what that of keys gave."""
    last: list = [None, None]

    def norm(x, weight, config):
        own = last[1] if weight.shape == (1,) and x is last[0] else x
        out = right(own, weight, config)
        last[:] = x, out
        return out

    return norm


_VALUES = values_of_normed_keys(layer.norm)


def values_of_turned_keys(right: Callable, *given):
    """Values that are keys, taken behind the rotation too."""
    attend = right(*given)

    def wrong(index, q, k, v, cache, *, window, **how):
        v = v if window is not None else k * jax.lax.rsqrt(jnp.mean(k * k, axis=-1, keepdims=True) + 1e-5)
        return attend(index, q, k, v, cache, window=window, **how)

    return wrong


def lends(change: Callable) -> Computed:
    """Keys and values that are lent, as `change(lent, of)` gives them."""

    def wrong(right: Callable, calls, lenders):
        made = right(calls, range(max(lenders) + 1))

        def attend(index, q, k, v, cache, *, of=None, **how):
            rest, lent = cache
            out, (rest, kept) = made.attend(
                index, q, k, v, (rest, lent if of is None else change(lent, of)), of=of, **how
            )
            return out, (rest, kept if of is None else lent)

        return made._replace(attend=attend)

    return Computed(layer_loop, "lending", wrong)


def gates_stopped(right: Callable, x):
    """Gates of attention, [rows, heads, size], without a gradient. Sigmoids of other shapes have theirs."""
    return right(jax.lax.stop_gradient(x) if x.ndim == 3 else x)


OVER = {
    "attention_over_boundaries": one_segment(attention, "packed", 0),
    "stream_norms_of_another_offset": lambda config, params: arms.field(norm_offset=1 - config.norm_offset)(
        config, params
    ),
}
STATE = {
    "state_leaks_over_boundaries": one_segment(gated_delta, "packed", 1),
    "convolution_leaks_over_boundaries": one_segment(gated_delta, "convolved", 2),
    "decay_behind_the_update": Computed(gated_delta, "packed", decays_afterwards_in_chunks),
    "state_lost_between_chunks": Computed(
        gated_delta, "_advance", lambda right, state, given: right(jnp.zeros_like(state), given)
    ),
    "keys_of_any_length": Computed(gated_delta, "keyed", keys_of_any_length),
    "rates_of_one": Computed(gated_delta, "keyed", lambda right, made, g, beta: right(made, g, jnp.ones_like(beta))),
}
ENGINE = {
    "convolution_tail_of_another_slot": Computed(recurrent_rows, "convolve", of_other_slots("tail")),
    "state_of_another_slot": Computed(recurrent_rows, "advance", of_other_slots("state")),
    "decay_behind_the_update": Computed(gated_delta, "step", decays_afterwards),
    "state_not_cleared": Computed(recurrent_rows, "advance", not_cleared),
    "one_row_too_many_repeated": Computed(
        recurrent_rows, "accepted", lambda right, cache, rows: right(cache, rows) + (rows.position > 0)
    ),
    "rejected_rows_settled": Computed(
        recurrent_rows,
        "advance",
        lambda right, cache, rows, *given: right(cache, rows._replace(settled=rows.count), *given),
    ),
}
GEMMA = {
    "values_behind_the_norm_of_keys": Computed(layer, "norm", lambda right, *given: _VALUES(*given)),
    "values_behind_the_rotation_of_keys": Computed(attention, "packed", values_of_turned_keys),
    "values_not_normed": arms.field(v_norm=False),
    "scores_scaled": arms.field(query_scale=None),
    "window_one_longer": arms.window(1),
    "window_one_shorter": arms.window(-1),
    "every_pair_turns": arms.whole(turned=1.0),
    "final_soft_cap_off": arms.field(final_soft_cap=None),
}
EMBEDS = {
    "lent_by_the_layer_before": lends(lambda lent, of: lent | {of: lent[0]} if of == 1 else lent),
    "embeddings_of_the_token_before": arms.outside("layer_embed", lambda config, leaf: np.roll(leaf, 1, axis=0)),
    "layer_scalars_dropped": arms.neutral("layer_scalar", 1),
}
MOE = {
    "gates_not_scaled": arms.neutral("expert_scale", 1),
    "experts_read_the_other_norm": arms.swapped("ffw_norm", "moe_norm"),
}
# By family and arm.
FAULTS: dict[str, dict[str, dict]] = {
    "qwen3_5": {"trainer": OVER | STATE, "engine": ENGINE},
    "qwen3_5_moe": {"trainer": {"shared_expert_left_out": arms.neutral("shared_down", 0)}},
    "qwen3_next": {"trainer": {"rows_by_key_head": arms.layers_with("linear_q", arms.products_behind_one_another)}},
    "gemma4": {"trainer": OVER | GEMMA},
    "gemma4_embeds": {"trainer": EMBEDS},
    "gemma4_moe": {"trainer": MOE},
}
# What is no longer differentiated. Log-probs stay as they are.
SLOPES: dict[str, dict[str, Computed]] = {
    "qwen3_5": {
        "states_between_chunks": stopped(gated_delta, "_advance", 0),
        "decays": stopped(gated_delta, "packed", "g"),
        "rates": stopped(gated_delta, "packed", "beta"),
        "gates_of_attention": Computed(jax.nn, "sigmoid", gates_stopped),
    },
    "qwen3_next": {"gates_of_experts": expert_arms.PLANTED["gates_without_gradient"]},
    "gemma4_embeds": {"lent_keys_and_values": lends(lambda lent, of: jax.lax.stop_gradient(lent))},
    "gemma4_moe": {"rows_of_experts": stopped(experts, "mixed", 0)},
}
ARMS = ("trainer", "scanned", "engine")
CHUNKS = {"qwen3_5": (16, 64)}
HYBRID, GEMMA4 = arms.LINEAR, ("gemma4", "gemma4_embeds", "gemma4_moe")
