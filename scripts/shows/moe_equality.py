"""What makes the engine fast changes no token of a mixture of experts either: rows, engines and whole runs, bit for bit.

1. moves: a row of the decoder goes among other rows, 50 times, and rows change places. No bit of any row changes.
2. ties: experts with equal scores. Engine, learner and the numpy twin take the lower number, at every place of a row.
3. engines: the suites of the row engine on a model with experts, against the independent sampler too. They have candidates,
   drafts, preemption, swaps with all three carry-overs, tail batching, elastic layouts, meshes, wide prompts and serving.
4. runs: the suites of whole runs. They have kill and resume, pipeline, drafts, environments, LoRA, a move to other devices, and
   replay of logged rollouts with their routes.

`--arms=NAME,NAME` runs some of these.
"""

from __future__ import annotations

import dataclasses
import functools

import engine_lab as lab
import jax
import jax.numpy as jnp
import numpy as np
import numpy_llama

from jaxrl_post.models import decoder, experts
from jaxrl_post.models.model_config import Experts

MINUTES = 30.0
PLATFORM = "cpu"
MODEL = dataclasses.replace(lab.TINY, experts=Experts(8, 2, 24, renormalised=False, shared_ffw=16))
ROWS, MOVES = 64, 50
ENVIRONMENT = {"LAB_MODEL": "experts"}
# Files, and which of their tests: the others look at weights or programs that a model with experts has not.
ENGINES = {
    "test_engine_equality.py": "",
    "test_engine_carry.py": "",
    "test_engine_checkpoint.py": "",
    "test_engine_demonstrations.py": "",
    "test_engine_drafting.py": "",
    "test_engine_elastic.py": "",
    "test_engine_head_rows.py": "",
    "test_engine_one_read.py": "",
    "test_engine_prompt_program.py": "",
    "test_engine_sharded.py": "",
    "test_engine_speculation.py": "",
    "test_engine_tail_batching.py": "",
    "test_engine_whole_hosts.py": "",
    "test_parallel_weight_sync.py": "",
    "test_serve_slots.py": "",
    "test_sim_twin.py": "",
}
RUNS = {
    "test_main.py": "",
    "test_main_resume.py": "",
    "test_main_pipeline.py": "not fails_in_its_midst",  # counts swaps of a run whose gate lets fewer updates through here
    "test_main_tail_batching.py": "",
    "test_main_speculation.py": "",
    "test_main_environments.py": "",
    "test_main_lora.py": "not additions_alone and not export_and_engine",  # name the matrices of a dense layer
    "test_main_moved.py": "",
    "test_main_elastic.py": "",
    "test_commands_replay.py": "",
}


def show(record) -> None:
    arms = {
        "moves": _moves,
        "ties": _ties,
        "engines": functools.partial(_suites, suites=ENGINES),
        "runs": functools.partial(_suites, suites=RUNS),
    }
    for name in record.options.get("arms", ",".join(arms)).split(","):
        arms[name](record)


def _attend(layer, q, k, v, cache, **how):
    """What a row sees of itself alone, so that its company can reach it through the experts only."""
    return q * 0.3 + jnp.repeat(k + v, q.shape[-2] // k.shape[-2], axis=-2) * 0.1, cache


@functools.partial(jax.jit, static_argnames="model")
def _rows(params, tokens, model):
    def choose(layer, scores, per_token, cache):
        ids, _ = experts.highest(layer, scores, per_token, None)
        return ids, (*cache, ids)

    ways = experts.ALONE._replace(choose=choose)
    h, routes = decoder.hidden(params, model, tokens, jnp.zeros_like(tokens), _attend, (), routing=ways)
    return h, jnp.stack(routes)


def _moves(record) -> None:
    params, noise = lab.weights(0, MODEL), np.random.default_rng(0)
    tokens = noise.integers(0, MODEL.vocab_size, ROWS)
    plain = np.asarray(_rows(params, tokens, MODEL)[0])
    permuted = moved = 0
    for _ in range(MOVES):
        order = noise.permutation(ROWS)
        permuted += int((np.asarray(_rows(params, tokens[order], MODEL)[0]) != plain[order]).any(axis=1).sum())
        others = noise.integers(0, MODEL.vocab_size, ROWS)
        source, target = noise.integers(ROWS, size=2)
        others[target] = tokens[source]
        moved += int((np.asarray(_rows(params, others, MODEL)[0])[target] != plain[source]).any())
    record.figure("moves.rows_compared", MOVES * ROWS + MOVES)
    record.figure("moves.permuted_rows_of_other_bits", permuted, equals=0)
    record.figure("moves.moved_rows_of_other_bits", moved, equals=0)


def _ties(record) -> None:
    """Every second expert has the scores of the one before it, so that each row has ties at its bound."""
    model = dataclasses.replace(MODEL, experts=Experts(8, 3, 24))
    params = decoder.init(model, 0)
    for layer in params["layers"].values():
        layer["router"] = np.repeat(layer["router"][:, ::2], 2, axis=1)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, ROWS)
    found = np.sort(np.asarray(_rows(params, tokens, model)[1]), axis=-1)
    pairs, lower = found // 2, found % 2 == 0
    alone = (pairs[..., :, None] == pairs[..., None, :]).sum(-1) == 1  # the expert whose equal twin was left out
    record.figure("ties.rows_with_a_tie_at_the_bound", int(alone.any(axis=-1).sum()), at_least=ROWS)
    record.figure("ties.upper_of_two_taken", int((alone & ~lower).sum()), equals=0)
    asked = lab.requests(12, temperatures=(1.0, 0.0))
    out = lab.run(lab.engine(params, model), asked)
    record.figure("ties.objections_of_the_independent_sampler", len(_objections(out, asked, params, model)), equals=0)


def _objections(out, asked, params, model) -> list[str]:
    """Returns greedy tokens that a float64 forward pass would not choose, by name of their rollout."""
    wrong = []
    for request in asked:
        if request.sampling.temperature:
            continue
        rollout = out[request.rollout_id]
        text, first = np.concatenate([request.prompt.tokens, rollout.tokens]), request.prompt.tokens.size - 1
        scores = numpy_llama.forward(params, model, text, dtype=np.float64)[first:-1]
        gaps = scores.max(-1) - np.take_along_axis(scores, rollout.tokens[:, None], axis=-1)[:, 0]
        wrong += [str(request.rollout_id)] * bool((gaps > 1e-4).any())
    return wrong


def _suites(record, suites) -> None:
    for file, selection in suites.items():
        name = file.removeprefix("test_").removesuffix(".py")
        passed = record.passed(f"tests/{file}", selection, timeout_s=3000, env=ENVIRONMENT)
        record.figure(f"suites.{name}.tests_passed", passed, at_least=1)
