"""Everything that only a GPU can show, in one command of under 9 minutes: `python scripts/gpu_check.py [--json FILE]`.

What does not fit before the deadline is left out and named in `not_reached`. The order is:

- tokens and log-probs are equal with candidates and without;
- kernels against their references;
- verify_sample's time;
- decode tokens per second of the row engine on random weights of Qwen2.5 shapes;
- verify_attention's time.

Times stand beside the floor of the bytes that must be read, at the bandwidth of a plain copy measured first. The object
has the shape of a show's result (scripts/record.py). FILE is scripts/results/gpu-check.json unless given.

Exit codes: 0 every bound holds; 1 a bound is missed; 2 no NVIDIA GPU of compute capability 9.0 or later.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record import ROOT, Record, write_json

os.environ.setdefault(
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"
)  # before jax: pages of 256 long rollouts need most of it

DEADLINE_S = 510.0
PAGE = 64
ROWS = (32, 160, 1280)  # of verify_sample: 32 rollouts; with 4 drafts; 256 rollouts with 4 drafts
VOCABULARY = 152064
BATCHES, CONTEXTS, DRAFTS = (16, 64, 256), (1024, 4096), (0, 1, 3, 7, 15)
LONG = 16384  # a third context, of attention alone
STEPS, TURNS = 32, 3  # of a dispatch; dispatches that are timed


class Deadline:
    """Leaves out what would begin too late, and remembers it."""

    def __init__(self, seconds: float):
        self._end, self.not_reached = time.monotonic() + seconds, []

    def reaches(self, what: str, needs_s: float) -> bool:
        """Whether something that takes about `needs_s` seconds may begin."""
        there = time.monotonic() + needs_s < self._end
        if not there:
            self.not_reached.append(what)
        return there


def why_not(devices: list) -> str:
    """Returns the sentence of the refusal, or nothing."""
    kind = devices[0]
    if kind.platform == "gpu" and float(getattr(kind, "compute_capability", 0) or 0) >= 9.0:
        return ""
    return (
        f"gpu_check needs an NVIDIA GPU of compute capability 9.0 or later, and jax sees {len(devices)} x "
        f"{kind.device_kind} ({kind.platform}); run it on such a machine, with the extra jaxrl_post[cuda]"
    )


def seconds(run: Callable, *arguments: Any, turns: int = 20) -> float:
    """Returns the seconds of one call: `turns` calls in a row, waited for once, after one call that compiles."""
    import jax

    jax.block_until_ready(run(*arguments))
    begun = time.perf_counter()
    out = [run(*arguments) for _ in range(turns)]
    jax.block_until_ready(out)
    return (time.perf_counter() - begun) / turns


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Returns the bytes read and written per second by a plain copy of `size` float32 numbers."""
    import jax
    import jax.numpy as jnp

    return 8 * size / seconds(jax.jit(lambda x: x + 1), jnp.zeros(size, jnp.float32), turns=5)


# ---- equality


def equality(record: Record, count: int = 64) -> None:
    """Checks that an engine's tokens, log-probs and entropies do not depend on candidates, with the kernels inside it."""
    import engine_lab as lab
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_post.models.decoder import ModelConfig

    model = ModelConfig(
        vocab_size=4096, embed=512, layers=4, heads=8, kv_heads=2, head_dim=128, ffw=1024, max_length=512, tied=True
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), lab.weights(0, model))
    engine = lab.engine(
        params,
        model,
        dtype=jnp.bfloat16,
        max_length=384,
        page_size=PAGE,
        pages=128,
        row_sizes=(128,),
        restricted=True,
        cost=any_cost((128,)),
    )
    asked = lab.requests(count, vocab=model.vocab_size, longest=96, longest_prompt=200, cuts=((0, 1.0), (50, 0.9)))
    plain, noise = lab.run(engine, asked), np.random.default_rng(0)
    record.figure("equality.num_tokens", sum(len(r) for r in plain.values()), at_least=count)
    for kind, right in (("right", 1.0), ("mixed", 0.8), ("wrong", 0.0)):
        texts = [plain[r.rollout_id].tokens for r in asked]
        guesses = [np.where(noise.random(text.size) < right, text, 7) for text in texts]
        engine.reset()
        engine.metrics()
        out = lab.run(engine, [lab.with_guesses(r, g) for r, g in zip(asked, guesses)])
        record.figure(f"equality.bits_equal_{kind}_candidates", lab.same_bits(plain, out), equals=True)
        record.figure(f"equality.accepted_{kind}_candidates", engine.metrics()["spec/num_accepted"])


def any_cost(sizes: tuple[int, ...]) -> Any:
    """Returns a step-cost table that decides nothing, as every run here has one row size."""
    from jaxrl_post.engine import step_cost

    return step_cost.analytic("h200", 1, 2, sizes)


# ---- kernels


def sampling_inputs(rows: int, vocab: int, seed: int = 0) -> tuple:
    """Returns logits of a standard deviation of 3, seeds, positions and temperatures."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    noise = np.random.default_rng(seed)
    logits = 3 * jax.random.normal(jax.random.key(seed), (rows, vocab), jnp.float32)
    return (
        logits,
        jnp.asarray(noise.integers(0, 2**32, (rows, 2), dtype=np.uint32)),
        jnp.asarray(noise.integers(0, 4096, rows), jnp.int32),
        jnp.asarray(np.resize([1.0, 0.7, 0.0, 1.3], rows), jnp.float32),
    )


def sampling_against_reference(record: Record, shapes=((3, 1024), (160, 4100), (256, VOCABULARY))) -> None:
    """Compares tokens. They may differ at near ties only, where the tokens' scores are equal to 1e-3."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_post.kernels import sampling, thresholds, verify

    for rows, vocab in shapes:
        logits, seeds, at, heat = sampling_inputs(rows, vocab)
        top_k = jnp.asarray(np.resize([0, 5, 50], rows), jnp.int32)
        top_p = jnp.asarray(np.resize([1.0, 0.9], rows), jnp.float32)
        lowests = {"whole": jnp.full(rows, -jnp.inf), "cut": jax.jit(thresholds.find)(logits, heat, top_k, top_p)}
        for name, lowest in lowests.items():
            got, want = (
                jax.jit(run)(logits, seeds, at, heat, lowest) for run in (verify.verify_sample, sampling.sample)
            )
            same = np.asarray(got.tokens == want.tokens)
            key = f"verify_sample.{name}_{rows}x{vocab}"
            record.figure(f"{key}.tokens_that_differ", int((~same).sum()), at_most=max(1, rows // 100))
            for field in ("logprobs", "entropies", "plain"):
                gap = np.abs(np.asarray(getattr(got, field)) - np.asarray(getattr(want, field)))[same]
                record.figure(f"{key}.max_{field}_difference", float(gap.max()), at_most=1e-3)


def sampling_times(record: Record, bandwidth: float, rows_of=ROWS, vocab: int = VOCABULARY) -> None:
    import jax
    import jax.numpy as jnp

    from jaxrl_post.kernels import sampling, thresholds, verify

    for rows in rows_of:
        given = sampling_inputs(rows, vocab)
        floor = 4 * rows * vocab / bandwidth
        took = seconds(jax.jit(verify.verify_sample), *given)
        cut = jnp.full(rows, 50, jnp.int32), jnp.full(rows, 0.9, jnp.float32)
        record.figure(
            f"verify_sample.{rows}_rows",
            {
                "ms": 1e3 * took,
                "floor_ms": 1e3 * floor,
                "share_of_bandwidth": floor / took,
                "reference_ms": 1e3 * seconds(jax.jit(sampling.sample), *given),
                "thresholds_ms": 1e3 * seconds(jax.jit(thresholds.find), given[0], given[3], *cut),
            },
        )


def attention_inputs(batch: int, context: int, drafts: int, heads: int, kv_heads: int, width: int) -> tuple:
    """Returns queries, cache and rows of `batch` rollouts of `context` positions, the last 1 + `drafts` of them rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_post.kernels import attention

    blocks, each = -(-context // PAGE), 1 + drafts
    cache = jax.jit(
        lambda key: jax.tree.map(
            lambda x: jax.random.normal(key, x.shape, jnp.bfloat16),
            jax.eval_shape(lambda: attention.empty(batch * blocks, PAGE, kv_heads, width, jnp.bfloat16)),
        )
    )(jax.random.key(1))
    slot = np.repeat(np.arange(batch, dtype=np.int32), each)
    position = np.tile(np.arange(context - each, context, dtype=np.int32), batch)
    table = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    q = jax.random.normal(jax.random.key(2), (batch * each, heads, width), jnp.bfloat16)
    return q, cache, attention.Rows(*map(jnp.asarray, (slot, position, np.ones(slot.size, bool), table)))


def attention_against_reference(record: Record, shapes=((4, 200, 4), (3, 1000, 0), (16, 4096, 3))) -> None:
    import jax
    import jax.numpy as jnp

    from jaxrl_post.kernels import attention

    for batch, context, drafts in shapes:
        given = attention_inputs(batch, context, drafts, 28, 4, 128)
        for name, how in (("plain", dict(window=None, soft_cap=None)), ("window", dict(window=150, soft_cap=30.0))):
            got, want = (
                jax.jit(functools.partial(run, scale=128**-0.5, **how))(*given).astype(jnp.float32)
                for run in (attention.attention, attention.reference)
            )
            record.figure(
                f"verify_attention.{name}_{batch}x{context}x{drafts}.max_difference",
                float(jnp.max(jnp.abs(got - want))),
                at_most=2e-2,
            )


def attention_times(record: Record, bandwidth: float, deadline: Deadline) -> None:
    """Times one layer of Qwen2.5-7B: 28 query heads, 4 key-value heads of 128."""
    import jax

    from jaxrl_post.kernels import attention

    run = jax.jit(functools.partial(attention.attention, scale=128**-0.5, window=None, soft_cap=None))
    for batch, context, drafts in ((b, c, d) for c in (*CONTEXTS, LONG) for b in BATCHES for d in DRAFTS):
        key = f"verify_attention.batch_{batch}_context_{context}_drafts_{drafts}"
        if deadline.reaches(key, 4.0):
            given = attention_inputs(batch, context, drafts, 28, 4, 128)
            took, floor = seconds(run, *given), 2 * 2 * batch * context * 4 * 128 / bandwidth
            record.figure(key, {"ms": 1e3 * took, "floor_ms": 1e3 * floor, "share_of_bandwidth": floor / took})


# ---- decoding


def models() -> dict[str, Any]:
    from jaxrl_post.models.presets import PRESETS

    return {name: PRESETS[name] for name in ("qwen2_5_1_5b", "qwen2_5_7b")}


def random_weights(model: Any) -> Any:
    """Returns bf16 weights drawn on the device: vectors are 1, matrices have a standard deviation of 0.02."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.models import decoder

    leaves, tree = jax.tree.flatten(decoder.abstract(model))
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    return tree.unflatten(
        jnp.ones(x.shape, jnp.bfloat16) if x.ndim == 1 else draw(jax.random.key(i), x.shape)
        for i, x in enumerate(leaves)
    )


def decode(
    record: Record, name: str, model: Any, bandwidth: float, deadline: Deadline, *, batches=BATCHES, contexts=CONTEXTS
) -> None:
    """Measures tokens per second of the engine as it runs, packing and reading included."""
    import jax
    import jax.numpy as jnp

    from jaxrl_post.engine.row_engine import EngineSettings

    most = -(-(max(contexts) + (TURNS + 1) * STEPS + 1) // PAGE) * PAGE
    params = random_weights(model)
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    settings = EngineSettings(
        slots=max(batches),
        max_length=most,
        page_size=PAGE,
        pages=max(batches) * most // PAGE,
        row_sizes=batches,
        head_rows=max(batches),
        steps_per_dispatch=STEPS,
        refill_slots=1,
        dtype=jnp.bfloat16,
    )
    engine = filled_engine(model, params, mesh_of_one(), settings, cost=any_cost(batches))
    for batch, context in ((b, c) for c in contexts for b in batches):
        key = f"decode.{name}.batch_{batch}_context_{context}"
        if not deadline.reaches(key, 8.0):
            continue
        took = min(turns(engine, batch, context))
        read = weight_bytes + 2 * 2 * batch * context * model.layers * model.kv_heads * model.head_dim
        record.figure(
            key,
            {
                "tokens_per_s": batch * STEPS / took,
                "step_ms": 1e3 * took / STEPS,
                "floor_ms": 1e3 * read / bandwidth,
                "share_of_bandwidth": read * STEPS / bandwidth / took,
            },
        )


def mesh_of_one() -> Any:
    from jaxrl_post.parallel import mesh

    return mesh.make_mesh()


def filled_engine(*arguments: Any, **more: Any) -> Any:
    """Returns a row engine that takes prompts as computed already.

    Their pages hold what was there before. The time of a step depends on lengths, not on values.
    """
    from jaxrl_post.engine.row_engine import RowEngine

    engine = RowEngine(*arguments, **more)
    seat = engine.admission.seat

    def filled(replica, sequence, entry):
        out = seat(replica, sequence, entry)
        sequence.num_computed = sequence.shared
        return out

    engine.admission.seat = filled
    return engine


def turns(engine: Any, batch: int, context: int) -> Iterator[float]:
    """Returns seconds of each timed dispatch: `batch` rollouts of `context` tokens so far, each of a prompt of its own."""
    import numpy as np

    from jaxrl_post.types import Prompt, Request, RolloutId, Sampling

    noise, asked = np.random.default_rng(0), []
    for index in range(batch):
        prompt = Prompt(id=str(index), tokens=noise.integers(0, engine.vocab_size, context))
        id = RolloutId(0, "train", 0, prompt.id, 0)
        asked.append(
            Request(
                rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=(TURNS + 1) * STEPS + 1, sampling=Sampling()
            )
        )
    engine.reset()
    engine.row_sizes = (batch,)
    engine.submit(asked)
    engine.step()
    for _ in range(TURNS):
        begun, clock = time.perf_counter(), engine.clock
        engine.step()
        assert engine.clock == clock + STEPS, "a dispatch ended early: what was timed is not a full one"
        yield time.perf_counter() - begun
    engine.park([request.rollout_id for request in asked])


def check(record: Record, deadline: Deadline) -> None:
    """Runs every section, the promised equality first."""
    import jax
    from jax._src.lib import xla_client

    bandwidth = record.figure("copy_gb_per_s", copy_bandwidth() / 1e9) * 1e9
    equality(record)
    sampling_against_reference(record)
    attention_against_reference(record)
    sampling_times(record, bandwidth)
    for name, model in models().items():
        if deadline.reaches(f"decode.{name}", 150.0):
            decode(record, name, model, bandwidth, deadline)
            gc.collect()  # its pages, before the next one's
    attention_times(record, bandwidth, deadline)
    record.figure("not_reached", deadline.not_reached)
    topology = xla_client.get_topology_for_devices(jax.devices())  # jax 0.11 gives the target's description through it
    record.figure("target_config", str(getattr(topology, "target_config", "")))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Checks and times kernels and engine on a GPU.", allow_abbrev=False)
    parser.add_argument("--json", type=Path, default=ROOT / "scripts" / "results" / "gpu-check.json")
    options = parser.parse_args(argv)
    import jax

    refusal = why_not(jax.devices())
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    record, finished = Record("gpu-check", ["python", "scripts/gpu_check.py", *argv]), False
    try:
        check(record, Deadline(DEADLINE_S))
        finished = True
    finally:  # an hour on a GPU is dear, so figures found before an error are kept, and say that they are not whole
        record.figure("finished", finished, equals=True)
        write_json(options.json, record.to_dict())
        print(record.table(), flush=True)
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(main(sys.argv[1:]))
