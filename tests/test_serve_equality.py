"""Equal bits of the server on several replicas and against the program of a run; and faults planted in what gives them."""

from __future__ import annotations

import concurrent.futures
import itertools

import pytest
from served import bits, mixed, policy, served

from jaxrl_post.ring.types import Prompt, RolloutId
from jaxrl_post.serve import prompts

COMPLETIONS = "/v1/completions"


def alone_and_together(one, count=24):
    """The bits of requests, sent one after the other and by 16 clients."""
    asked = mixed(count)
    alone = [bits(one.post(COMPLETIONS, **body)) for body in asked]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return alone, list(pool.map(lambda body: bits(one.post(COMPLETIONS, **body)), asked))


@pytest.mark.extended
def test_equal_bits_on_two_replicas():
    with served(policy(mesh__data=2)) as one:
        assert one.server.engine.sizes.replicas == 2 and one.server.service.most == 2 * 8 + 200
        alone, together = alone_and_together(one)
    assert alone == together
    with served(policy()) as one:
        assert alone_and_together(one)[0] == alone, "a replica of the same sizes gives other bits"


@pytest.mark.extended
def test_requests_without_cuts_have_the_bits_of_generate():
    """The server's program takes top-k and top-p. That of `generate` does not, where nobody asks for them."""
    own = policy()
    with served(policy()) as one:
        found = one.post(COMPLETIONS, prompt="12+34=", n=8, seed=5, max_tokens=20, return_token_ids=True, logprobs=0)
    named = prompts.Reading(own.tokenizer, None, 64, tools=False)._bounded("prompt", "12+34=").id
    keys = [[RolloutId(5, "eval", 0, named, sample).seed() for sample in range(8)]]
    rollouts = own.generate(["12+34="], n=8, seeds=keys, max_tokens=20)[0]
    for choice, rollout in zip(found["choices"], rollouts, strict=True):
        assert choice["token_ids"] == rollout.tokens.tolist()
        assert choice["logprobs"]["token_logprobs"] == rollout.logprobs.tolist()


def noise_of_the_serial(patch):
    """Noise is keyed by the order of arrival."""
    serials = itertools.count()
    real = prompts.Request
    patch.setattr(
        prompts, "Request", lambda **given: real(**given | {"seed": RolloutId(next(serials), "eval", 0, "", 0).seed()})
    )


def one_name_for_all_prompts(patch):
    """Prompts of one length share their pages, whatever they say."""
    patch.setattr(Prompt, "of_tokens", lambda tokens: Prompt(id=f"{len(tokens)}", tokens=tokens))


@pytest.mark.extended
@pytest.mark.parametrize("plant", [noise_of_the_serial, one_name_for_all_prompts])
def test_a_planted_fault_breaks_the_equality(monkeypatch, plant):
    plant(monkeypatch)
    with served(policy()) as one:
        alone, together = alone_and_together(one)
    assert alone != together
