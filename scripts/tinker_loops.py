"""The Tinker SDK's loops against a server: python tinker_loops.py PLAN.json OUT.json

Runs where the SDK is installed and this project need not be. The supervised loop and the RL loop are written after the SDK's
documentation and the cookbook's recipes sl_loop and rl_loop, with nothing but public calls. Data, reward and the seeds of samples are
ours. OUT.json holds what each part of the plan found.

PLAN.json: {"base_url", "base_model", "parts": {PART: arguments}}, the parts supervised, rl, scored, small, endless and refused.
TINKER_API_KEY is the key.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types


def main(plan: str, out: str) -> None:
    given = json.loads(Path(plan).read_text())
    service = tinker.ServiceClient(base_url=given["base_url"])
    names = [one.model_name for one in service.get_server_capabilities().supported_models]
    found: dict[str, Any] = {"sdk": importlib.metadata.version("tinker"), "models": names}
    for part, arguments in given["parts"].items():
        found[part] = PARTS[part](service, given["base_model"], **arguments)
    Path(out).write_text(json.dumps(found))


def _datum(tokens: list[int], **floats: list[float]) -> types.Datum:
    """Returns a datum whose targets are the tokens behind the inputs."""
    inputs: dict[str, Any] = {name: np.array(values, np.float32) for name, values in floats.items()}
    inputs["target_tokens"] = np.array(tokens[1:], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def supervised(service: Any, base: str, *, solved: list, steps: int, batch: int, rate: float, rank: int) -> dict:
    """The supervised loop: the mean negative log-likelihood of each step's solutions, by a linear schedule."""
    training = service.create_lora_training_client(base_model=base, rank=rank)
    tokenizer, losses = training.get_tokenizer(), []
    for step in range(steps):
        data, count = [], 0
        for prompt, solution in (solved[(step * batch + i) % len(solved)] for i in range(batch)):
            asked, told = tokenizer.encode(prompt), [*tokenizer.encode(solution), tokenizer.eos_token_id]
            data.append(_datum(asked + told, weights=[0.0] * (len(asked) - 1) + [1.0] * len(told)))
            count += len(told)
        adam = types.AdamParams(learning_rate=rate * (1.0 - step / steps), beta1=0.9, beta2=0.95, eps=1e-8)
        passed = training.forward_backward(data, loss_fn="cross_entropy")
        stepped = training.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"] / count)
        stepped.result()
    return {"losses": losses, "path": training.save_state("supervised").result().path}


def rl(
    service: Any, base: str, *, problems: list, steps: int, prompts: int, group: int, rate: float, rank: int
) -> dict:
    """The RL loop: rewards of each step's rollouts, with advantages centred within a group."""
    training = service.create_lora_training_client(base_model=base, rank=rank)
    tokenizer, rewards = training.get_tokenizer(), []
    adam = types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
    for step in range(steps):
        path = training.save_weights_for_sampler(name=f"{step:06d}").result().path
        sampling, asked = service.create_sampling_client(model_path=path), []
        for place in range(prompts):
            prompt, answer = problems[(step * prompts + place) % len(problems)]
            ids = tokenizer.encode(prompt)
            params = [types.SamplingParams(max_tokens=48, seed=step * group + one) for one in range(group)]
            model_input = types.ModelInput.from_ints(ids)
            futures = [sampling.sample(prompt=model_input, num_samples=1, sampling_params=one) for one in params]
            asked.append((ids, answer, futures))
        data, scores = [], []
        for ids, answer, futures in asked:
            rollouts = [future.result().sequences[0] for future in futures]
            texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in rollouts]
            won = [float(text.replace(" ", "").rpartition("#")[2] == answer) for text in texts]
            mean = sum(won) / len(won)
            scores.append(mean)
            for one, reward in zip(rollouts, won) if len(set(won)) > 1 else ():
                unseen, count = [0.0] * (len(ids) - 1), len(one.tokens)
                floats = {"logprobs": unseen + one.logprobs, "advantages": unseen + [reward - mean] * count}
                data.append(_datum(ids + one.tokens, **floats))
        passed = training.forward_backward(data, loss_fn="importance_sampling")
        stepped = training.optim_step(adam)
        passed.result()
        stepped.result()
        rewards.append(sum(scores) / len(scores))
    return {"rewards": rewards}


def scored(service: Any, base: str, *, data: list, losses: dict, rank: int) -> dict:
    """Log-probs, the loss and the norm of its gradient for each loss, on the base's own weights."""
    training, found = service.create_lora_training_client(base_model=base, rank=rank), {}
    for loss, arguments in losses.items():
        datums = [_datum(one["tokens"], **{name: one[name] for name in arguments["needs"]}) for one in data]
        passed = training.forward_backward(datums, loss_fn=loss, loss_fn_config=arguments["config"]).result()
        norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        logprobs = [one["logprobs"].tolist() for one in passed.loss_fn_outputs]
        found[loss] = {"logprobs": logprobs, "loss": passed.metrics["loss:sum"], "norm": norm}
    return found


def small(service: Any, base: str, *, problems: list, seed: int, steps: int, rank: int) -> list:
    """A short loop of every kind of call, and every number that it gave."""
    training, found = service.create_lora_training_client(base_model=base, rank=rank, seed=seed), []
    tokenizer, adam = training.get_tokenizer(), types.AdamParams(learning_rate=3e-3)
    for step in range(steps):
        sampling = training.save_weights_and_get_sampling_client()
        params, data = types.SamplingParams(max_tokens=24, seed=seed + step), []
        asked = [tokenizer.encode(problems[(seed + step + i) % len(problems)][0]) for i in range(6)]
        futures = [sampling.sample(types.ModelInput.from_ints(ids), 3, params) for ids in asked]
        for ids, future in zip(asked, futures):
            for place, one in enumerate(future.result().sequences):
                found.append([one.tokens, one.logprobs, one.stop_reason])
                unseen, count = [0.0] * (len(ids) - 1), len(one.tokens)
                data.append(
                    _datum(ids + one.tokens, logprobs=unseen + one.logprobs, advantages=unseen + [place - 1.0] * count)
                )
        found.append(sampling.compute_logprobs(types.ModelInput.from_ints(asked[0])).result())
        passed = training.forward_backward(data, loss_fn="ppo").result()
        found += [passed.metrics["loss:sum"], [one["logprobs"].tolist() for one in passed.loss_fn_outputs]]
        found.append(training.optim_step(adam).result().metrics)
    state = training.save_state(f"small-{seed}-{rank}").result().path
    copy = service.create_training_client_from_state_with_optimizer(state)
    passes = [one.forward_backward(data, loss_fn="cispo").result().metrics for one in (training, copy)]
    steps_of = [one.optim_step(adam).result().metrics for one in (training, copy)]
    assert passes[0] == passes[1] and steps_of[0] == steps_of[1], "a loaded state went on with other numbers"
    return [*found, passes, steps_of]


def endless(service: Any, base: str, *, problems: list) -> None:
    """Trains until it is killed, and says when it has begun."""
    for seed in range(1 << 30):
        small(service, base, problems=problems, seed=seed, steps=1, rank=8)
        print("running", flush=True)


def refused(service: Any, base: str, *, data: list) -> list[str]:
    """What the SDK says of requests that are not served."""
    training, said = service.create_lora_training_client(base_model=base, rank=4), []
    good = _datum(data[0]["tokens"])
    beyond = types.ModelInput.from_ints([1 << 20])
    sampling, greedy = service.create_sampling_client(base_model=base), types.SamplingParams(max_tokens=4)
    for call in (
        lambda: service.create_lora_training_client(base_model="Qwen/Qwen3-8B"),
        lambda: training.forward_backward([good], "ppo").result(),
        lambda: training.forward_backward([good], "cross_entropy", {"clip": 1.0}).result(),
        lambda: sampling.sample(beyond, 1, greedy).result(),
        lambda: sampling.sample(good.model_input, 1, greedy, topk_prompt_logprobs=3).result(),
        lambda: training.load_state("tinker://no/weights/such").result(),
        lambda: service.create_sampling_client(model_path="tinker://no/sampler_weights/such"),
    ):
        try:
            call()
            said.append("")
        except (tinker.TinkerError, ValueError) as error:
            said.append(str(error))
    return said


PARTS = {one.__name__: one for one in (supervised, rl, scored, small, endless, refused)}


if __name__ == "__main__":
    main(*sys.argv[1:])
