"""Models beside the policy: teacher, critic, reward model and judge. What is refused of them, and how each is made.

A teacher and a reward model have the policy's tokens, and a position for every token of a rollout. A critic has the
policy's shape. A judge has an engine of its own on the devices of the run's engine. All are known by the hash of their
folders (runs/checkpoint/identity.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import config as configs
from jaxrl_post.config import Config
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.launch.parts.python_inputs import OWN
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import published
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.json_text import of_hub
from jaxrl_post.runs.checkpoint import identity
from jaxrl_post.trainer import reward_scorer
from jaxrl_post.trainer.critic import Critic
from jaxrl_post.trainer.state import is_abstract
from jaxrl_post.trainer.teacher import Teacher

_ENGINE = ("slots", "page_size", "row_sizes", "prompt_rows", "steps_per_dispatch", "refill_slots", "dtype")
_ANY_BATCH = 1 << 30  # tokens: no batch is made, so none may be too small


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A second model: the option that names its folder, what it is, with an article, and what to do without the folder."""

    option: str
    name: str
    instead: str


TEACHER = Kind(
    option="teacher.path",
    name="a teacher",
    instead="a teacher is a Hugging Face directory, such as the policy/ of a run",
)
CRITIC = Kind(option="critic.path", name="a critic", instead="leave it empty to start from the policy's weights")
REWARD_MODEL = Kind(
    option="reward.model",
    name="a reward model",
    instead="a reward model is a Hugging Face directory, such as the reward_model/ of a run",
)
JUDGE = Kind(option="judge.model", name="a judge", instead="name a policy, for example RUN/policy")


@dataclass(frozen=True, kw_only=True)
class SecondModel:
    """A model on this machine: its folder and its shape."""

    place: Path
    model: decoder.ModelConfig


def shape(kind: Kind, path: str) -> decoder.ModelConfig:
    """Returns the shape of the second model in a folder.

    Raises:
      ValueError: there is no such folder, or its config.json cannot be read.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{kind.option}={path}: no such folder with a config.json{of_hub(path)}; {kind.instead}")
    return hf.read_config(file)


def weights(path: str | Path) -> Callable[..., Any]:
    """Returns a function from shardings, and a dtype, to the weights of a folder."""

    def load(shardings: Any, dtype: Any = np.float32) -> Any:
        return hf.load(path, dtype=dtype, shardings=shardings)[1]

    return load


def opened(kind: Kind, path: str, tokenizer: tokenizers.Tokenizer, longest: int) -> SecondModel:
    """Returns a model that reads the policy's rollouts. Its weights are not looked at.

    Args:
      tokenizer: the policy's tokenizer.
      longest: engine.max_length, of prompt and rollout together.

    Raises:
      ValueError: one sentence with the first difference.
    """
    place, named, scalar = Path(path), f"{kind.option}={path}", kind is REWARD_MODEL
    model = shape(kind, path)
    if scalar and not model.scalar:
        raise ValueError(
            f"{named} is a policy: a reward model's architecture is ...ForSequenceClassification; train one with "
            "algorithm.loss_mode='bradley_terry'"
        )
    if model.scalar and not scalar:
        raise ValueError(f"{named} is a reward model, which gives tokens no probability; {kind.name} is a policy")
    if model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"{named}: its model has {model.vocab_size} tokens and the policy's tokenizer {tokenizer.vocab_size}; {kind.name} reads "
            "the policy's tokens"
        )
    if difference := _difference(tokenizer, tokenizers.load(place)):
        raise ValueError(f"{named}: {difference}; {kind.name} has the policy's tokenizer")
    if model.max_length < longest:
        raise ValueError(
            f"{named}: it has {model.max_length} positions, fewer than engine.max_length={longest}; the nearest valid "
            f"engine.max_length is {model.max_length}"
        )
    return SecondModel(place=place, model=model)


def _difference(ours: tokenizers.Tokenizer, theirs: tokenizers.Tokenizer) -> str:
    """Returns how the tokens of two tokenizers differ, or an empty text."""
    if ours.vocab_size != theirs.vocab_size:
        return f"its tokenizer has {theirs.vocab_size} tokens, the policy's {ours.vocab_size}"
    exact = all(isinstance(one, tokenizers.JsonTokenizer) for one in (ours, theirs))
    for index in range(ours.vocab_size):
        own, other = (_token(one, index, exact) for one in (ours, theirs))
        if own != other:
            return f"token {index} of its tokenizer is {other!r}, of the policy's {own!r}"
    return ""


def _token(tokenizer: tokenizers.Tokenizer, index: int, exact: bool) -> str | None:
    """Returns a token as its vocabulary writes it. Vocabularies of two kinds are compared by what a token decodes to."""
    if exact and isinstance(tokenizer, tokenizers.JsonTokenizer):
        return tokenizer.model.id_to_token(index)
    return tokenizer.decode([index], skip_special=False)


def refuse_whole_hosts(config: Config) -> None:
    """Refuses what does not work where whole processes learn and whole processes generate.

    Raises:
      ValueError: one sentence with what works instead.
    """
    c, near = config, "the nearest valid mesh.engine is 0"
    apart = f"does not work where whole hosts learn and whole hosts generate; {near}"
    state = (
        "keeps state that processes without the learner's devices do not have, and with this mesh.engine whole processes "
        f"generate; {near}"
    )
    every = f"by every process, and with mesh.engine={c.mesh.engine} some have no device of the engine; {near}"
    for used, sentence in (
        (c.lora.rank, f"lora.rank={c.lora.rank} {apart}"),
        (c.engine.weights != "auto", f"engine.weights={c.engine.weights!r} {apart}"),
        (c.algorithm.needs_critic, f"algorithm.adv_estimator={c.algorithm.adv_estimator!r} {state}"),
        (c.algorithm.kl_target, f"algorithm.kl_target={c.algorithm.kl_target} {state}"),
        (c.algorithm.needs_teacher, f"teacher.path={c.teacher.path} {apart}"),
        (c.reward.model, f"reward.model={c.reward.model} is scored {every}"),
        (c.judge.model, f"judge.model={c.judge.model} is asked {every}"),
    ):
        if used:
            raise ValueError(sentence)


# ---- The teacher


def teacher(
    config: Config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh,
    attention: Callable[[decoder.ModelConfig], Callable | None],
    plans: bool,
) -> Teacher:
    """Builds the teacher of a run.

    Args:
      model: of the policy.
      attention: from a model to the devices' kernel for packed rows, or None.
      plans: the teacher gets shapes in the place of weights.

    Raises:
      ValueError: teacher.path holds no weights of the shape that its config.json says.
    """
    own, dtype = teacher_shape(config, model), jnp.dtype(config.teacher.dtype)
    load = functools.partial(weights(config.teacher.path), dtype=dtype)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), decoder.abstract(own))
    return Teacher(own, shapes if plans else load, mesh, attention(own))


def teacher_shape(config: Config, model: decoder.ModelConfig) -> decoder.ModelConfig:
    """Returns the teacher's shape, with the rows that the policy's tokenizer uses.

    It is that of teacher.path, where that is here, or of the published model that the path's last name says.

    Raises:
      ValueError: nothing says the shape.
    """
    path = Path(config.teacher.path)
    elsewhere = None if (path / "config.json").is_file() else published(path.name)
    found = elsewhere or shape(TEACHER, config.teacher.path)
    used = model.used_vocab or model.vocab_size
    return dataclasses.replace(found, used_vocab=used if used < found.vocab_size else 0)


def check_teacher(config: Config, tokenizer: tokenizers.Tokenizer) -> None:
    """Refuses a run's teacher that is not here, reads other tokens than the policy, or is too short for its rollouts.

    Args:
      tokenizer: the policy's tokenizer.

    Raises:
      ValueError: one sentence with the first difference.
    """
    if config.algorithm.needs_teacher:
        opened(TEACHER, config.teacher.path, tokenizer, config.engine.max_length)


# ---- The critic


def critic(config: Config, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh) -> Critic:
    """Builds the critic of a run.

    Args:
      params: the policy's weights, or their shapes for a critic that only plans.

    Raises:
      ValueError: critic.path is no folder with a decoder of the policy's shape.
    """
    start, path = params, config.critic.path
    own = dataclasses.asdict(shape(CRITIC, path)) if path else {}
    for name, there in own.items():
        here = dataclasses.asdict(model)[name]
        if name not in ("tied", "used_vocab", "family") and there != here:
            raise ValueError(
                f"critic.path={path}: its decoder has {name}={there}, the policy has {here}; the critic has the policy's shape"
            )
    if path and not is_abstract(params):
        start = _critic_weights(path)
    return Critic(model, start, mesh, settings=config.critic, optimizer=config.optimizer, steps=config.steps)


def _critic_weights(path: str) -> Any:
    """Returns a function from the policy's shardings to the folder's weights, without its head."""

    def load(shardings: Any) -> Any:
        tied = shape(CRITIC, path).tied
        asked = {name: home for name, home in shardings.items() if name != "head"}
        if not tied:
            asked["head"] = shardings.get("head", shardings["embed"])
        return hf.load(path, shardings=asked)[1]

    return load


# ---- The reward model: a decoder whose head gives each token one number. That of the last token is the reward


def trained_shape(config: Config, model: decoder.ModelConfig) -> decoder.ModelConfig:
    """Returns the shape that a run trains from the shape of its files: that of a reward model, or of a policy.

    Raises:
      ValueError: a policy is needed, and the files are a reward model.
    """
    if config.algorithm.trains_reward_model:
        return replace(model, scalar=True)
    if model.scalar:
        raise ValueError(
            f"model.path={config.model.path} is a reward model, which writes no tokens: name a policy, or train it further with "
            "algorithm.loss_mode='bradley_terry'"
        )
    return model


def with_score_head(
    files: decoder.ModelConfig, model: decoder.ModelConfig, load: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns what loads the weights of `model` from files of the shape `files`, as `load` loads those.

    Scores of tokens are left out, and a new scalar head is 0. So every first reward is 0.
    """
    if files.scalar == model.scalar:
        return load

    def read(shardings: Any, dtype: Any = np.float32) -> Any:
        trunk = {name: home for name, home in shardings.items() if name != "score"}
        left_out = {} if files.tied else {"head": shardings["embed"]}
        params = load(trunk | left_out, dtype)
        head = np.zeros((model.embed, 1), jax.tree.leaves(params)[0].dtype)
        return {name: params[name] for name in trunk} | {"score": meshes.put(head, shardings["score"])}

    return read


def folder_name(model: decoder.ModelConfig) -> str:
    """Returns the name of the folder in which a run leaves its model."""
    return "reward_model" if model.scalar else "policy"


def reward_model(config: Config, tokenizer: tokenizers.Tokenizer) -> SecondModel | None:
    """Returns the run's reward model, or None where it has none. `tokenizer`: the policy's tokenizer.

    Raises:
      ValueError: the folder holds no reward model, or one whose tokens or positions do not fit the policy's.
    """
    if not config.reward.model:
        return None
    return opened(REWARD_MODEL, config.reward.model, tokenizer, config.engine.max_length)


def scorer(config: Config, own: SecondModel, mesh: jax.sharding.Mesh) -> reward_scorer.RewardScorer:
    """Loads a reward model onto the engine's mesh, in the engine's dtype, and compiles it.

    Raises:
      ValueError: its weights are wrong, or on this device a score depends on the texts beside it.
    """
    made = reward_scorer.RewardScorer(
        own.model, weights(own.place), mesh, longest=config.engine.max_length, dtype=jnp.dtype(config.engine.dtype)
    )
    if not made.keeps_bits():
        raise ValueError(
            f"reward.model={config.reward.model}: on this device the bits of a score depend on the texts that are scored beside it, "
            "so that a run could not be repeated; leave it empty"
        )
    return made


def scorer_temporaries(config: Config, own: SecondModel, mesh: jax.sharding.Mesh) -> int:
    """Returns the bytes of temporary memory that the program needs on a device."""
    program, shapes = reward_scorer.scoring(
        own.model, mesh, reward_scorer.tiled(config.engine.max_length), jnp.dtype(config.engine.dtype)
    )
    return program.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


# ---- The judge


def judge_settings(config: configs.Config) -> configs.Config:
    """Returns the settings of the judge's engine.

    Raises:
      ValueError: there is no such model, or it is a reward model.
    """
    about = config.judge
    if shape(JUDGE, about.model).scalar:
        raise ValueError(f"judge.model={about.model} is a reward model, which writes no reply; name it in reward.model")
    values = {
        "model": {"path": about.model},
        "mesh": {"data": config.replicas, "tensor": config.mesh.replica},
        "engine": {name: getattr(config.engine, name) for name in _ENGINE} | {"max_length": about.max_length},
        "sampling": {"max_tokens": about.max_tokens, "keep_routes": False},
        "batch": {"tokens": _ANY_BATCH},
        "data": {"train": f"{OWN}questions", "date": config.data.date},
        "reward": {"functions": ()},
        "eval": {"prompts": 0},
    }
    return configs.resolve(values, (), platform=jax.default_backend())


def judge_digest(config: configs.Config) -> dict[str, str]:
    """Returns a hash of the judge's files by a name for it; empty where there is none."""
    return {"judge.model": identity.weights(Path(config.judge.model))} if config.judge.model else {}
