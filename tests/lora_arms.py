"""LoRA against an explicit full model: its gradient by W + scale A B and the chain rule, in numpy. Tests and shows use it."""

from __future__ import annotations

import dataclasses
import functools

import gradient_arms as arms
import jax
import made_groups
import numpy as np

from jaxrl_post.algorithms import advantages
from jaxrl_post.models import layer, lora
from jaxrl_post.models.model_config import Lora, ModelConfig
from jaxrl_post.parallel import mesh
from jaxrl_post.trainer.learner import Learner, LearnerSettings

EVERY = ("q", "k", "v", "o", "gate", "up", "down")
PLAIN = Lora(4, 8.0, EVERY)
ROOTED = Lora(4, 8.0, EVERY, True)


def adapter(given: Lora, seed: int, dtype=np.float32, model: ModelConfig = made_groups.MODEL) -> dict:
    """Returns random A and B, neither of them 0, in host memory. Those of two seeds are near each other."""
    noise = np.random.default_rng(0)
    shapes = lora.abstract(lora.adapting(model, given)).adapter
    drawn = jax.tree.map(lambda leaf: (0.1 * noise.standard_normal(leaf.shape)).astype(dtype), shapes)
    return made_groups.moved(drawn, seed, 0.01)


def flat(value: np.ndarray, inputs: int) -> np.ndarray:
    """Returns a tensor as a matrix: its first axes against the others."""
    return value.reshape(int(np.prod(value.shape[:inputs])), -1)


def scale(given: Lora) -> float:
    """Returns alpha / r, or alpha / sqrt(r), as the papers say."""
    return given.alpha / (given.rank**0.5 if given.rslora else given.rank)


def pairs(name: str, *leaves: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Returns the parts of leaves that belong together: one of each, or one of each for every expert."""
    return list(zip(*leaves, strict=True)) if name.startswith("experts_") else [leaves]


def inputs(name: str) -> int:
    """Returns the number of axes that a matrix contracts."""
    return 2 if name == "o" else 1


def product(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns A B, of each expert by itself."""
    return np.stack([flat(one, inputs(name)) @ flat(other, 1) for one, other in pairs(name, a, b)])


def matrices(added: dict) -> list[str]:
    """Returns the matrices of a layer that have additions."""
    return [name[:-2] for name in added if name.endswith("_a")]


def merged(base: dict, added: dict, given: Lora) -> dict:
    """Returns W + scale A B in numpy, matrix by matrix."""
    layers = {}
    for number, weights in base["layers"].items():
        own = layers[number] = dict(weights)
        for name in matrices(added["layers"][number]):
            a, b = (np.asarray(added["layers"][number][f"{name}_{part}"]) for part in "ab")
            own[name] = np.asarray(own[name]) + scale(given) * product(name, a, b).reshape(own[name].shape)
    return {**base, "layers": layers}


def chained(gradient: dict, added: dict, given: Lora) -> dict:
    """Returns the gradients of A and B from those of the merged matrices: dA = scale G B', dB = scale A' G."""
    out: dict = {"layers": {}}
    for number, own in added["layers"].items():
        leaves = out["layers"][number] = {}
        for name in matrices(own):
            a, b, count = own[f"{name}_a"], own[f"{name}_b"], inputs(name)
            slope = scale(given) * np.asarray(gradient["layers"][number][name])
            parts = [(flat(one, count), flat(two, 1), flat(g, count)) for one, two, g in pairs(name, a, b, slope)]
            leaves[f"{name}_a"] = np.stack([g @ two.T for _, two, g in parts]).reshape(a.shape)
            leaves[f"{name}_b"] = np.stack([one.T @ g for one, _, g in parts]).reshape(b.shape)
    return out


@functools.cache
def explicit(given: Lora, model: ModelConfig = made_groups.MODEL) -> dict:
    """Returns the gradient of the additions by the explicit model, in float64."""
    groups, a = made_groups.groups(), arms.algorithm()
    values = [advantages.grpo(one.rewards, one.scored, np.array([len(r) for r in one.rollouts])) for one in groups]
    with arms.precision(np.float64):
        base = made_groups.weights(0, np.float64, model)
        old, policy, reference = (merged(base, adapter(given, seed, np.float64, model), given) for seed in (1, 2, 3))
        full = made_groups.plain_gradient(
            jax.tree.map(jax.numpy.asarray, policy),
            model,
            groups,
            values,
            old,
            jax.tree.map(jax.numpy.asarray, reference),
            mode="token-mean",
            low=a.clip_ratio_low,
            high=a.clip_ratio_high,
            kl_coef=a.kl_loss_coef,
            entropy_coef=a.entropy_coef,
            max_tokens=arms.MAX_TOKENS,
            temperature=0.8,
        )
        return chained(jax.device_get(full), adapter(given, 2, np.float64, model), given)


def learner(given: Lora, dtype=np.float32, *, kind=arms.Uncommitted, model=made_groups.MODEL, **more) -> Learner:
    """Returns a learner of additions to the weights of seed 0. The reference has additions too."""
    made = dataclasses.replace
    algorithm = made(arms.algorithm(), **more.pop("changes", {}))
    settings = LearnerSettings(
        algorithm=algorithm,
        optimizer=more.pop("optimizer", arms.config.OptimizerConfig()),
        batch=arms.config.BatchConfig(rows=4, tokens=48, head_chunk=64),
        temperature=0.8,
        steps=10,
        max_tokens=arms.MAX_TOKENS,
        compute_dtype=np.dtype(dtype).name,
        **{name: more.pop(name) for name in arms.OPTIONAL & more.keys()},
    )
    return kind(
        lora.adapting(model, given),
        made_groups.weights(0, dtype, model),
        mesh.make_mesh(*more.pop("sizes", (1, 1, 1))),
        settings,
        adapter=adapter(given, 1, dtype, model),
        reference=adapter(given, 3, dtype, model),
        **more,
    )


def gap(given: Lora, dtype=np.float32, model=made_groups.MODEL, **more) -> float:
    """Returns the largest distance of a leaf's gradient from `explicit`, in relative 2-norm."""
    groups = made_groups.groups()
    with arms.precision(dtype):
        one = learner(given, dtype, model=model, **more)
        one.prepare(groups)
        one._old.settle(one.logprobs)
        one._old.committed = True  # as if a commit had moved the policy, so that ratios are not 1
        moved = mesh.put(
            adapter(given, 2, dtype, model), jax.tree.map(lambda x: x.sharding, one.state.params["policy"])
        )
        one.state = dataclasses.replace(one.state, params={**one.state.params, "policy": moved})
        one.accumulate(groups)
        found = jax.device_get(one.gradient())
    return arms.worst(found, explicit(given, model))


def planted(fault: str, monkeypatch) -> None:
    """Plants a mistake into the learner's additions."""
    if fault == "scale":
        monkeypatch.setattr(Lora, "scale", property(lambda self: 2 * scale(self)))
    elif fault == "rslora":
        monkeypatch.setattr(Lora, "scale", property(lambda self: self.alpha / self.rank))
    elif fault == "transposed":
        plain = layer.Layer._product

        def product(self, name, x):
            b = getattr(self, f"{name}_b")
            value = b[...]
            b.set_value(value.reshape(-1, value.shape[0]).T.reshape(value.shape))
            out = plain(self, name, x)
            b.set_value(value)
            return out

        monkeypatch.setattr(layer.Layer, "_product", product)
    else:
        raise ValueError(fault)


FAULTS = ("scale", "rslora", "transposed")


def trained_base_is_found() -> bool:
    """Plants a step that moves the base too. Returns whether the saved digest then refuses the base."""
    one = learner(PLAIN)
    saved = jax.tree.map(np.array, jax.device_get(one.state))
    one._base = jax.tree.map(lambda leaf: leaf * np.float32(1 + 2**-22), one._base)
    try:
        one.restore(lambda shapes: jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), saved, shapes), 1)
    except ValueError as error:
        return "another base" in str(error)
    return False
