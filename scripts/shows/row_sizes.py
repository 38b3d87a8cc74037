"""Small row sizes join a run's key: products have one shape for every number of rows, so a batch that drains pays for its rows.

1. bits: an engine with fixed products keeps 16, 32, 64, 128 and 256 rows on a CPU, each with the bits of the others, with drafts
   and without. Products and norms of every form, attention and draws by every kernel in interpret mode have their bits in every
   number of rows. Planted faults of the forms are caught, and the library's products lose sizes.
2. tail: the simulator drains batches of 256 rollouts by a cost that is fitted to the steps that one H100 measured. Before, all
   steps have 256 rows. After, the last 16 rollouts pay for 16.
3. compiled: how each product of a decode step of Qwen2.5-1.5B tiles its sum at five numbers of rows, by the vendors' compilers
   for v5e, v6e and sm_90 (scripts/compile_tier/row_sizes.py). Fixed products have one tiling at all of them. Of the library's,
   with one tile named by flags of XLA and without, the pairs of sizes that differ are named.

What the fixed products cost on a device is for `gpu_check` to measure (`row_products`, `decode_fixed`). Until it has measured at
most 1.05 times the library's time, the library's products stay the default.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator

import compilers
import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import planted

from jaxrl_post.engine import bit_probe
from jaxrl_post.engine.host.wire import FIXED, LIBRARY
from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.kernels import attention, attention_gpu, attention_tpu, sampling, sampling_gpu, sampling_tpu, verify
from jaxrl_post.kernels.pallas_gpu import plgpu
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling
from jaxrl_post.simulate import workloads
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.pace import LockStep
from jaxrl_post.simulate.texts import SimTexts
from jaxrl_post.simulate.trial import InSizes

MINUTES = 24.0
LIMIT_MINUTES = 30.0
PLATFORM = "cpu"
SOURCES = ("scripts/compile_tier",)
SIZES = (16, 32, 64, 128, 256)
TARGETS, PRODUCTS = ("v5e", "v6e", "sm_90"), 8  # of a layer and the head
TESTS = "tests/test_kernels_row_blocks.py"
FAULTS = ("product_gpu", "product_tpu", "row_blocks")
MEASURED, MODEL, CARD = "gpu-check.json", "decode.qwen2_5_1_5b.batch_{}_context_{}", ((16, 64, 256), (1024, 4096))
SLOTS, LIVE, BATCHES, CONTEXT, MEDIAN, SPREAD, CAP = 256, 16, 5, 1024, 400.0, 0.9, 4096


def show(record) -> None:
    begun = time.monotonic()
    _bits(record)
    _kernels(record)
    _tail(record)
    _compiled(record)
    record.figure("minutes", (time.monotonic() - begun) / 60, at_most=LIMIT_MINUTES)


# ---- bits


def _bits(record) -> None:
    asked = lab.requests(24)
    groups = lab.groups_of(asked, lab.run(lab.engine(), asked), vary=0.2)
    for products in (FIXED, LIBRARY):
        sizes = dict(row_sizes=SIZES, head_rows=max(SIZES), products=products, drafting=lab.drafting("ours", groups))
        engine = lab.engine(**sizes)
        kept = bit_probe.keep_equal_sizes(engine)
        bound = {"equals": len(SIZES)} if products == FIXED else {"at_most": len(SIZES) - 1}
        record.figure(f"bits.{products}.sizes_kept_of_{len(SIZES)}", sum(kept.values()), **bound)
        if products == FIXED:
            outs = [_alone(engine, size, asked) for size in SIZES]
            equal = sum(lab.same_bits(outs[-1], out) for out in outs)
            record.figure("bits.fixed.sizes_with_equal_rollouts", equal, equals=len(SIZES))
            wrong = lab.against_sampler(outs[0], asked, lab.weights(0))
            record.figure("bits.fixed.rollouts_unlike_the_numpy_twin", len(wrong), equals=0)
    record.figure("bits.tests_passed", record.passed(TESTS, ""), at_least=20)
    faults = [one for one in planted.known() if one.id.split(".")[0] in FAULTS]
    caught = [one.verdict == "caught" for one in planted.tried(faults, root=record.root)]
    record.figure("bits.planted", len(caught), at_least=5)
    record.figure("bits.planted_caught", sum(caught), equals=len(caught))


def _alone(engine, size: int, asked: list) -> dict:
    engine.reset()
    engine.row_sizes = (size,)
    return lab.run(engine, asked)


def _kernels(record) -> None:
    """Attention and draws of the kernels without their devices, and of the references: rows have their bits in every number."""
    for name, run, given in (*_attending(), *_drawing()):
        whole = _told(run(*given))
        equal = [_told(run(*(x[:size] for x in given))) == [one[:size] for one in whole] for size in SIZES]
        other = _told(run(*(x[::-1] for x in given))) == [one[::-1] for one in whole]
        record.figure(f"bits.{name}.equal_sizes", sum(equal), equals=len(SIZES))
        record.figure(f"bits.{name}.equal_at_other_places", other, equals=True)


def _told(made) -> list[list[bytes]]:
    """Returns the bytes of each row of each array."""
    return [[row.tobytes() for row in np.asarray(x)] for x in jax.tree.leaves(made)]


def _attending() -> Iterator[tuple[str, Callable, tuple]]:
    noise, (K, G, H, page, blocks, rows) = np.random.default_rng(0), (1, 2, 64, 64, 2, max(SIZES))
    pages = jnp.asarray(noise.normal(size=(rows * 2, page, 2 * K, H)), jnp.bfloat16)
    table = jnp.asarray(noise.integers(0, rows * 2, (rows, blocks)), jnp.int32)
    q = jnp.asarray(noise.normal(size=(rows, K * G, H)), jnp.bfloat16)
    slot, real = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, bool)
    position = jnp.asarray(noise.integers(0, page * blocks, rows), jnp.int32)
    how = dict(scale=H**-0.5, window=None, soft_cap=None)

    def tpu(q, slot, position, real):
        at = attention.Rows(slot, position, real, table)
        return attention_tpu.attention(q, pages, at, interpret=True, **how)

    def gpu(q, slot, position, real):
        at = attention.Rows(slot, position, real, table)
        return attention_gpu.attention(q, pages, at, interpret=plgpu.InterpretGPUParams(), **how)

    def reference(q, slot, position, real):
        at = attention.Rows(slot, position, real, table)
        return attention.reference(q, attention.Cache(pages), at, **how)

    for name, run in (("tpu", tpu), ("gpu", gpu), ("reference", reference)):
        yield f"attention_{name}", jax.jit(run), (q, slot, position, real)


def _drawing() -> Iterator[tuple[str, Callable, tuple]]:
    noise, rows, vocab = np.random.default_rng(1), max(SIZES), 2500
    given = (
        jnp.asarray(noise.normal(size=(rows, vocab)) * 3, jnp.float32),
        jnp.asarray(noise.integers(0, 1 << 31, (rows, 2)), jnp.uint32),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.ones(rows, jnp.float32),
    )
    for name, kernel, mode in (("tpu", sampling_tpu, True), ("gpu", sampling_gpu, plgpu.InterpretGPUParams())):
        draw = verify.drawn_by(functools.partial(kernel.statistics, interpret=mode))
        yield f"draws_{name}", jax.jit(lambda *x, draw=draw: draw(*x, None)), given
    yield "draws_reference", jax.jit(sampling.sample), given


# ---- the tail of a batch


def _tail(record) -> None:
    cost, error = _fitted(json.loads((record.root / "scripts" / "results" / MEASURED).read_text())["figures"])
    record.figure("tail.cost_from_measured_steps_at_most", round(error, 4), at_most=0.1)
    for rows in (LIVE, SLOTS):
        step = float(cost(np.array([rows]), np.array([LIVE * CONTEXT]))[0])
        record.figure(f"tail.ms_of_a_step_of_{rows}_rows_with_{LIVE}_rollouts", round(1e3 * step, 3))
    found = {sizes: _drained(InSizes(cost=cost, sizes=sizes)) for sizes in ((SLOTS,), SIZES)}
    (whole, tail), (whole_after, tail_after) = found[(SLOTS,)], found[SIZES]
    record.figure("tail.seconds_before", round(tail, 3))
    record.figure("tail.seconds_after", round(tail_after, 3))
    record.figure("tail.after_over_before", round(tail_after / tail, 4), at_most=0.6)
    record.figure("tail.batch_after_over_before", round(whole_after / whole, 4), at_most=0.9)
    # By so much all steps may become longer until a batch takes as long as before.
    record.figure("tail.steps_may_take_times", round(whole / whole_after, 3))


def _fitted(figures: dict) -> tuple[DecodeCost, float]:
    """Returns fixed seconds, seconds a row and seconds a token of KV by least squares of relative errors, and the largest of those."""
    points = [
        (rows, rows * context, 1e-3 * figures[MODEL.format(rows, context)]["step_ms"]) for rows, context in _points()
    ]
    sides = np.array([[1 / s, rows / s, tokens / s] for rows, tokens, s in points])
    (fixed, row, token), *_ = np.linalg.lstsq(sides, np.ones(len(points)), rcond=None)
    cost = DecodeCost(weights_s=0.0, token_s=token, row_s=0.0, fixed_s=fixed, request_s=row, source=MEASURED)
    told = [float(cost(np.array([rows]), np.array([tokens]))[0]) / s for rows, tokens, s in points]
    return cost, max(abs(one - 1) for one in told)


def _points() -> Iterator[tuple[int, int]]:
    return itertools.product(*CARD)


def _drained(cost: InSizes) -> tuple[float, float]:
    """Returns the seconds of BATCHES batches, and of their ends with at most LIVE rollouts. No prompt follows."""
    whole = tail = 0.0
    for seed in range(BATCHES):
        lengths = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SPREAD, SLOTS).clip(1, CAP).astype(int)
        texts = SimTexts(workloads.groups(tuple((one,) for one in lengths.tolist())), cap=CAP, tv=0.0)
        engine = SimEngine(texts, replicas=1, slots=SLOTS, pace=LockStep(cost))
        engine.submit([_request(index, seed) for index in range(SLOTS)])
        while engine.pending:
            before, few = engine.seconds, engine.pending <= LIVE
            engine.step()
            tail += (engine.seconds - before) * few
        whole += engine.seconds
    return whole, tail


def _request(index: int, seed: int) -> Request:
    prompt = Prompt(id=str(index), tokens=np.zeros(CONTEXT, np.int32))
    name = RolloutId(seed, "train", 0, prompt.id, 0)
    return Request(rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=CAP, sampling=Sampling())


# ---- compiled


def _compiled(record) -> None:
    python = compilers.python(record.root, "row-sizes")
    for target in TARGETS:
        for form in (FIXED, "one_tile", LIBRARY) if target == "sm_90" else (FIXED, LIBRARY):
            found = compilers.told(record, python, "scripts/compile_tier/row_sizes.py", target, form)
            _tilings(record, f"{target}.{form}", form, {rows: found[str(rows)] for rows in SIZES})


def _tilings(record, key: str, form: str, found: dict[int, dict]) -> None:
    """Writes how many products differ between two sizes, and which sizes agree in all."""
    tilings = {rows: one["tilings"] for rows, one in found.items()}
    several = {product for one in tilings.values() for product in one}
    differ = {product: [list(same) for same in _alike(tilings, product)] for product in sorted(several)}
    differ = {product: sizes for product, sizes in differ.items() if len(sizes) > 1}
    if form == FIXED:
        record.figure(f"{key}.products_of_xla", sum(one["of_library"] for one in found.values()), equals=0)
        kernels = [one["kernels"] for one in found.values()]
        record.figure(f"{key}.kernels_of_products", min(kernels), equals=PRODUCTS)
        record.figure(f"{key}.tilings", tilings[SIZES[0]], equals=tilings[SIZES[-1]])
    bound = {"equals": 0} if form == FIXED else {}
    record.figure(f"{key}.products_that_differ", len(differ), **bound)
    record.figure(f"{key}.sizes_that_agree", differ)
    pairs = [pair for pair in itertools.combinations(SIZES, 2) if tilings[pair[0]] == tilings[pair[1]]]
    bound = {"equals": len(SIZES) * (len(SIZES) - 1) // 2} if form == FIXED else {}
    record.figure(f"{key}.pairs_of_sizes_that_agree", len(pairs), **bound)
    record.figure(f"{key}.pairs", [list(pair) for pair in pairs])


def _alike(tilings: dict[int, dict], product: str) -> list[tuple[int, ...]]:
    """Returns the sizes in groups with one tiling of a product."""
    groups: dict[str, list[int]] = {}
    for rows, one in tilings.items():
        groups.setdefault(json.dumps(one.get(product)), []).append(rows)
    return [tuple(sizes) for sizes in groups.values()]
