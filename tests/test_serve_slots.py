"""Slots over a row engine: their tokens are those of the engine driven directly, whenever slots are filled, read and freed."""

import re

import engine_lab as lab
import numpy as np
import pytest

from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling
from jaxrl_post.serve.slots import ENDED, LENGTH, TOKEN, VALID, Slots

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAW = Sampling(temperature=1.0, eos_ids=(lab.EOS,))
MAX_LENGTH = lab.BASE["max_length"]


@pytest.fixture(scope="module")
def engine():
    return lab.engine()


@pytest.fixture
def slots(engine):
    engine.reset()
    made = Slots(engine, LAW, seed=5)
    yield made
    made.clear()


def prompts(count: int) -> list[np.ndarray]:
    noise = np.random.default_rng(1)
    return [noise.integers(4, lab.TINY.vocab_size, noise.integers(1, 60)).astype(np.int32) for _ in range(count)]


def directly(given: list[np.ndarray], law: Sampling = LAW) -> tuple[list[Request], list[list[int]]]:
    """Returns the requests and tokens of an engine that gets all prompts at once, with other dispatches."""
    asked = []
    for place, tokens in enumerate(given):
        prompt = Prompt.of_tokens(tokens)
        asked.append(
            Request(
                rollout_id=RolloutId(0, "train", 0, prompt.id, place),
                prompt=prompt,
                seed=RolloutId(5, "eval", 0, prompt.id, 0).seed(),
                max_tokens=MAX_LENGTH - tokens.size,
                sampling=law,
            )
        )
    found = lab.run(lab.engine(steps_per_dispatch=3), asked)
    return asked, [found[one.rollout_id].tokens.tolist() for one in asked]


def driven(slots: Slots, given: list[np.ndarray], limits: list[int], free: bool) -> list[list[int]]:
    """Returns the tokens that an orchestrator would send: it reads ahead, fills slots late and never says a limit."""
    noise, waiting, out = np.random.default_rng(2), list(range(len(given))), [[] for _ in given]
    empty, running = list(range(slots.count)), {}
    while waiting or running:
        while waiting and empty and (not running or noise.random() < 0.4):
            slot, place = empty.pop(int(noise.integers(len(empty)))), waiting.pop(0)
            slots.insert(given[place], slot)
            running[slot] = place
        rows = slots.read()
        for slot, place in list(running.items()):
            if rows[slot, LENGTH] > limits[place]:
                del running[slot]
                empty.append(slot)
                if free:
                    slots.free(slot)
                continue
            assert rows[slot, VALID] == 1
            out[place].append(int(rows[slot, TOKEN]))
            assert rows[slot, LENGTH] == len(out[place])
    return out


@pytest.mark.parametrize("free", [True, False])
def test_tokens_are_those_of_the_engine_and_of_the_independent_sampler(slots, free):
    given = prompts(40)
    limits = [int(n) for n in np.random.default_rng(3).integers(1, 50, len(given))]
    asked, wanted = directly(given)
    assert driven(slots, given, limits, free) == [tokens[:limit] for tokens, limit in zip(wanted, limits)]
    assert any(tokens[-1] == lab.EOS for tokens in wanted) and any(len(t) > n for t, n in zip(wanted, limits))
    independent = [lab.reference(one, lab.weights(0)) for one in asked[:4]]
    assert [[draw.token for draw in draws] for draws in independent] == wanted[:4]


@pytest.mark.extended
def test_slots_lie_on_all_replicas(slots):
    given, limits = prompts(40), [30] * 40
    two = Slots(lab.engine(mesh=meshes.make_mesh(data=2)), LAW, seed=5)
    assert two.count == 2 * slots.count
    assert driven(two, given, limits, True) == driven(slots, given, limits, True)


def test_equal_prompts_have_equal_tokens_in_any_slot_at_any_time(slots):
    (prompt,) = prompts(1)
    found = []
    for slot in (0, 3, 7):
        slots.insert(prompt, slot)
        found.append(slots.read()[slot, TOKEN])
    assert len(set(found)) == 1
    slots.insert(prompt, 3)
    again = slots.read()
    assert again[3].tolist() == [found[0], 1, 1] and again[0, LENGTH] == 4 and again[5].tolist() == [0, 0, 0]


def test_a_slot_ends_at_the_last_position_and_stays_ended(slots, engine):
    prompt = np.full(MAX_LENGTH - 2, 5, np.int32)
    slots.insert(prompt, 1)
    lengths = [int(slots.read()[1, LENGTH]) for _ in range(4)]
    assert lengths in ([1, 2, ENDED, ENDED], [1, ENDED, ENDED, ENDED]) and not engine.pending


def test_a_prompt_that_cannot_be_served_ends_without_a_token(slots, engine):
    most = MAX_LENGTH - 1
    for tokens, why in (
        ([], "empty"),
        ([5] * (most + 1), f"{most + 1} tokens and engine.max_length={MAX_LENGTH} .* is {most}"),
        ([5, lab.TINY.vocab_size], f"token {lab.TINY.vocab_size}, outside 0..{lab.TINY.vocab_size - 1}"),
        ([-2], "token -2, outside"),
    ):
        assert re.search(why, slots.refusal(tokens))
        slots.insert(tokens, 0)
        assert slots.read()[0].tolist() == [0, 0, ENDED] and not engine.pending
    assert slots.refusal([5] * most) == ""


def test_a_slot_that_does_not_exist_is_refused(slots):
    with pytest.raises(ValueError, match=f"slot 16 of {slots.count}; the largest valid slot is 15"):
        slots.insert([5], 16)


def test_a_freed_slot_takes_nothing_of_the_engine(slots, engine):
    for slot, prompt in enumerate(prompts(5)):
        slots.insert(prompt, slot)
    slots.read()
    before = engine.pending
    slots.free(2)
    slots.free(2)
    slots.free(9)
    assert slots.read()[2].tolist() == [0, 0, 0] and before - engine.pending >= 1
    slots.clear()
    assert not engine.pending and not slots.read().any()
