"""Drafting costs about as much with a long past as with a short one: 256 slots, 1k, 8k and 128k tokens of history a
prompt.

Measures milliseconds of an engine step of 512 rows on a tiny random model, with 256 rollouts running, each of a prompt
of its own. Past rollouts are texts of a Markov chain of order 2 over 512 words, in two epochs of 8 each. Five engines
take turns: one for each of the three sizes, one that looks nothing up, and one without a drafter. A figure is the
median over the turns. The drafter alone, outside the step, is timed beside them. Device memory is what is allocated for
the prompts' tables, over all tokens of history.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

MINUTES = 3.0
SLOTS, ROWS, STEPS, PROMPT, ANSWER = 256, 512, 8, 8, 160
STATES = 4096  # states of the chain
SIZES = {"1k": 1 << 10, "8k": 1 << 13, "128k": 1 << 17}
PASTS = 16  # different pasts; prompts take them in turn, each in a place of its own
EPOCHS, GROUP, TURNS, DISPATCHES = 2, 8, 15, 2

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    import jax

    from jaxrl_post.models import decoder

    config = decoder.ModelConfig(
        vocab_size=512, embed=64, layers=3, heads=4, kv_heads=4, head_dim=16, ffw=192, max_length=256, tied=True
    )
    params, chain = decoder.init(config, 0), _chain(config.vocab_size)
    engines = {"off": _engine(config, params, "off", {}), "no_past": _engine(config, params, "ours", {})}
    for size, tokens in SIZES.items():
        pasts = {n: _pasts(chain, n, tokens) for n in range(PASTS)}
        record.figure(f"{size}.build_ms_per_prompt", round(_build_ms(pasts), 2))
        engines[size] = _engine(config, params, "ours", pasts)
        _turn(engines[size], 0, config.vocab_size)
        _memory(record, size, engines[size], tokens)
    seconds = {name: [] for name in engines}
    for turn in range(1, TURNS + 2):
        for name, engine in list(engines.items())[turn % len(engines) :] + list(engines.items())[: turn % len(engines)]:
            seconds[name].append(_turn(engine, turn, config.vocab_size))
    ms = {name: 1e3 * statistics.median(found[1:]) for name, found in seconds.items()}  # the first turn warms up
    for name in engines:
        record.figure(f"{name}.step_ms", round(ms[name], 3))
        record.figure(f"{name}.accepted_per_drafted", _accepted(engines[name]))
    record.figure("step_128k_over_1k", ms["128k"] / ms["1k"], at_most=2.5)
    record.figure("step_8k_over_1k", ms["8k"] / ms["1k"], at_most=2.5)
    record.figure("step_1k_over_off", ms["1k"] / ms["off"])
    alone = _alone(jax, {name: engines[name] for name in SIZES})
    for name in SIZES:
        record.figure(f"{name}.drafter_alone_ms", round(alone[name], 3))
    record.figure("drafter_alone_128k_over_1k", alone["128k"] / alone["1k"])


def _chain(vocab: int):
    """Returns a sampler of texts whose next token depends on the last two.

    The last two tokens are in one of 4096 states. A state has four continuations, the first the likeliest. Frequent
    words are frequent as in a language.
    """
    import numpy as np

    noise = np.random.default_rng(0)
    after = (noise.zipf(1.3, (STATES, 4)) - 1) % vocab
    shares = np.cumsum([0.7, 0.15, 0.1, 0.05])

    def texts(seed: int, count: int, length: int):
        noise = np.random.default_rng((1, seed))
        out = noise.integers(0, vocab, (count, length)).astype(np.int32)
        which = np.searchsorted(shares, noise.random((count, length)))
        for at in range(2, length):
            out[:, at] = after[(31 * out[:, at - 2] + out[:, at - 1]) % STATES, np.minimum(which[:, at], 3)]
        return out

    return texts


def _pasts(chain, number: int, tokens: int) -> tuple:
    """Returns two epochs of 8 rollouts, `tokens` in all, newest first. Those of one prompt begin alike."""
    import numpy as np

    from jaxrl_post.history import Past

    length, flat = tokens // EPOCHS // GROUP, np.zeros(GROUP, np.float32)
    out = []
    for epoch in reversed(range(EPOCHS)):
        text = chain(2 * number + epoch, GROUP, length).reshape(-1)
        out.append(
            Past(
                epoch=epoch,
                tokens=text,
                favourites=text,
                offsets=np.arange(GROUP + 1) * length,
                rewards=flat,
                scored=flat == 0,
                versions=flat.astype(np.int32),
            )
        )
    return tuple(out)


def _build_ms(pasts: dict) -> float:
    """Measures how long the host takes to make a prompt's table."""
    from jaxrl_post.engine.speculation import corpus
    from jaxrl_post.types import Prompt

    seconds = []
    for past in pasts.values():
        begun = time.perf_counter()
        corpus.grams(past, Prompt(id="0", tokens=[0]))
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


def _engine(config, params, name: str, pasts: dict):
    """Returns an engine with these past rollouts by prompt number; without any, its tables are as small as can be.

    Rows are free in its step-cost table, so that every step drafts.
    """
    from jaxrl_post.engine import step_cost
    from jaxrl_post.engine.host.wire import UPLOAD
    from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
    from jaxrl_post.engine.speculation import corpus
    from jaxrl_post.engine.speculation.registry import DRAFTERS
    from jaxrl_post.engine.speculation.speculation import Drafting
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes
    from jaxrl_post.types import Prompt

    mesh = meshes.make_mesh()
    placed = meshes.put(params, meshes.param_shardings(mesh, decoder.axes(config), "engine"))
    anyone = Prompt(id="0", tokens=[0])
    room = -(-corpus.grams(pasts[0], anyone).size // UPLOAD) * UPLOAD if pasts else 1
    drafter = DRAFTERS[name](vocab=config.vocab_size, width=7, entries=SLOTS * room, live=1 << 10)
    drafting = Drafting(drafter, replicas=1, slots=SLOTS, past=lambda prompt: pasts.get(int(prompt) % PASTS, ()))
    return RowEngine(
        config,
        placed,
        mesh,
        EngineSettings(
            slots=SLOTS,
            max_length=PROMPT + ANSWER,
            page_size=16,
            refill_slots=8,
            pages=SLOTS * -(-(PROMPT + ANSWER) // 16),
            row_sizes=(ROWS,),
            head_rows=ROWS,
            steps_per_dispatch=STEPS,
        ),
        cost=step_cost.StepCost((1, ROWS), (1.0, 1.0), "rows are free"),
        drafting=drafting,
    )


def _turn(engine, turn: int, vocab: int) -> float:
    """Returns the seconds of a step with all slots running. Every prompt finds its table where it was."""
    import numpy as np

    from jaxrl_post.types import Prompt, Request, RolloutId, Sampling

    asked = []
    for number in range(SLOTS):
        noise = np.random.default_rng(number)
        name = RolloutId(0, "train", 0, str(number), 0, turn)
        asked.append(
            Request(
                rollout_id=name,
                prompt=Prompt(id=str(number), tokens=noise.integers(0, vocab, PROMPT)),
                seed=name.seed(),
                max_tokens=ANSWER,
                sampling=Sampling(),
            )
        )
    engine.submit(asked)
    while engine.clock == 0 or any(one.num_computed < PROMPT for one in engine.sequences.values()):
        assert not engine.step(), "an answer ended before all had begun"
    before, begun = engine.clock, time.perf_counter()
    for _ in range(DISPATCHES):
        assert not engine.step(), "an answer ended while steps were timed"
    took = (time.perf_counter() - begun) / (engine.clock - before)
    engine.park([request.rollout_id for request in asked])
    return took


def _accepted(engine) -> float:
    counts = engine.metrics()
    return counts.get("spec/num_accepted", 0.0) / max(1.0, counts.get("spec/num_drafted", 0.0))


def _memory(record, size: str, engine, tokens: int) -> None:
    """Writes the memory of the tables on the device, every prompt's in a place of its own."""
    regions = engine.drafting._shelves[0].regions
    record.figure(f"{size}.prompts_with_a_table", len(regions), equals=SLOTS)
    held = sum(region.room for region in regions.values()) * engine.device.tables.entries.dtype.itemsize
    record.figure(f"{size}.table_bytes", held)
    record.figure(
        f"{size}.allocated_bytes_per_token", engine.device.tables.entries.nbytes / (SLOTS * tokens), at_most=12.0
    )
    record.figure(f"{size}.bytes_per_token", held / (SLOTS * tokens), at_most=12.0)


def _alone(jax, engines: dict) -> dict:
    """Returns milliseconds of `propose` for all slots, by itself: looking up, without writing."""
    import numpy as np

    from jaxrl_post.engine.speculation.interface import OFFSET, ROW, SIZE

    noise, timed, seconds = np.random.default_rng(0), {}, {name: [] for name in engines}
    for name, engine in engines.items():
        place = np.zeros((SLOTS, 5), np.int32)
        for number, region in enumerate(engine.drafting._shelves[0].regions.values()):
            place[number, [OFFSET, SIZE, ROW]] = region.offset, region.size, number
        tables, memory = jax.tree.map(lambda x: x[0], (engine.device.tables, engine.device.state.memory))
        tokens = noise.integers(0, engine.vocab_size, (SLOTS, PROMPT + ANSWER)).astype(np.int32)
        given = jax.device_put(
            (tables, memory, tokens, np.full(SLOTS, 100, np.int32), place, np.zeros(SLOTS, np.int32))
        )
        timed[name] = jax.jit(engine.drafting.drafter.propose), given
    for _ in range(4 * TURNS):
        for name, (run, given) in timed.items():
            begun = time.perf_counter()
            jax.block_until_ready(run(*given))
            seconds[name].append(time.perf_counter() - begun)
    return {name: 1e3 * statistics.median(found[1:]) for name, found in seconds.items()}
