"""Where a critic starts: the policy's weights or a folder's, and what is refused in one sentence."""

import dataclasses

import jax
import made_groups
import numpy as np
import pytest

from jaxrl_post.config import default, resolve
from jaxrl_post.launch.parts import build, second_models
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.state import is_abstract

MODEL = dataclasses.replace(made_groups.MODEL, tied=False, family="llama")


def config(*overrides):
    return resolve(default(), ["model.preset=tiny", "algorithm.adv_estimator=gae", *overrides])


def saved(folder, model=MODEL, seed=3):
    params = decoder.init(model, seed)
    hf.save(folder, model, params, dtype="float32")
    return params


def test_a_folders_weights_without_its_head(tmp_path):
    there = saved(tmp_path / "critic")
    policy = decoder.init(MODEL, 0)
    made = second_models.critic(config(f"critic.path={tmp_path / 'critic'}"), MODEL, policy, meshes.make_mesh())
    assert "head" in there and "head" not in made.weights["trunk"]
    np.testing.assert_array_equal(made.weights["trunk"]["embed"], there["embed"])
    assert not np.array_equal(there["embed"], policy["embed"])
    made = second_models.critic(config(), MODEL, policy, meshes.make_mesh())
    np.testing.assert_array_equal(made.weights["trunk"]["embed"], policy["embed"])


@pytest.mark.parametrize(
    "path, words",
    [
        ("nowhere", "no such folder with a config.json; leave it empty"),
        ("wider", "its decoder has ffw=32, the policy has 24; the critic has the policy's shape"),
    ],
)
def test_a_folder_of_no_use_is_refused(tmp_path, path, words):
    saved(tmp_path / "wider", dataclasses.replace(MODEL, ffw=32))
    with pytest.raises(ValueError, match=words):
        second_models.critic(
            config(f"critic.path={tmp_path / path}"), MODEL, decoder.abstract(MODEL), meshes.make_mesh()
        )


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_a_plan_has_shapes_alone(trunk):
    given = config(f"critic.trunk={trunk}")
    model = PRESETS["tiny"]
    learner = build.learner(given, model, decoder.abstract(model), build.device_plan(given))
    assert is_abstract(learner.state) and ("trunk" in learner.state.params["critic"]) == (trunk == "own")
    assert jax.tree.leaves(learner.state.opt_state["critic"])
