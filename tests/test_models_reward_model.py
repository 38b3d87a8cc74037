"""Reward models as Hugging Face directories: names as AutoModelForSequenceClassification has them, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import parity_arms as arms
import pytest
import reward_model_arms as pairs
import safetensors.numpy
from refusals import refused

from jaxrl_post.config import default, resolve
from jaxrl_post.launch.parts import inputs, second_models
from jaxrl_post.models import decoder, families, hf

# transformers has none of these of texts but Qwen3.5's without experts: the others' names are made alike.
OF_TEXTS = {"gemma3": "Gemma3", "gemma4": "Gemma4", "gemma4_embeds": "Gemma4", "gemma4_moe": "Gemma4"}
OF_TEXTS |= {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
NAMES = {family: f"{name}TextForSequenceClassification" for family, name in OF_TEXTS.items()}


def saved(folder, family: str = "llama2"):
    """A reward model of a golden's decoder."""
    policy, params = hf.load(arms.GOLDENS / family)
    head = np.random.default_rng(1).standard_normal((policy.embed, 1)).astype(np.float32)
    model = dataclasses.replace(policy, scalar=True)
    hf.save(folder, model, {name: leaf for name, leaf in params.items() if name != "head"} | {"score": head})
    return model, params, head


@pytest.mark.parametrize("family", arms.FAMILIES)
def test_a_folder_has_the_names_of_transformers_and_comes_back(family, tmp_path):
    model, params, head = saved(tmp_path / "out", family)
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    whole = families.write(dataclasses.replace(model, scalar=False))["architectures"][0]
    assert about["architectures"] == [NAMES.get(family, whole.replace("CausalLM", "SequenceClassification"))]
    assert about["id2label"] == {"0": "LABEL_0"}
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(tensors["score.weight"], head.T)
    assert "lm_head.weight" not in tensors
    again, loaded = hf.load(tmp_path / "out")
    assert again == model
    np.testing.assert_array_equal(loaded["score"], head)
    np.testing.assert_array_equal(loaded["embed"], params["embed"])
    assert jax.tree.map(np.shape, loaded) == jax.tree.map(lambda leaf: leaf.shape, decoder.abstract(model))


@pytest.mark.parametrize("labels", [{}, {"0": "bad", "1": "good"}])
def test_a_classifier_of_several_labels_is_refused(labels, tmp_path):
    saved(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": labels}))
    refused("id2label names 2 labels, and a reward model has 1", hf.read_config, file)


def test_a_reward_model_is_no_policy_and_a_policy_may_become_one():
    policy, reward = (resolve(default(), [*("model.preset=tiny",), *more]) for more in ((), _TRAINS))
    assert second_models.trained_shape(reward, pairs.MODEL) == pairs.MODEL
    assert second_models.trained_shape(reward, dataclasses.replace(pairs.MODEL, scalar=False)) == pairs.MODEL
    refused("is a reward model, which writes no tokens", second_models.trained_shape, policy, pairs.MODEL)
    assert inputs.shape(reward).scalar and not inputs.shape(policy).scalar


_TRAINS = (
    *(
        "engine.name=preferences",
        "algorithm.loss_mode=bradley_terry",
        "algorithm.adv_estimator=pairs",
        "eval.prompts=0",
    ),
    *("algorithm.loss_agg_mode=seq-mean-token-sum", "scheduler.group_size=2"),
)


@pytest.mark.parametrize(
    "option, value",
    [("eval.prompts", 4), ("algorithm.entropy_coef", 0.1), ("algorithm.kl_loss_coef", 0.1), ("lora.rank", 2)],
)
def test_what_a_reward_model_has_not_is_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}={value}.*the nearest valid {option} is 0"):
        resolve(default(), ["model.preset=tiny", *_TRAINS, f"{option}={value}"])
