"""A run that trains low-rank additions: resumed to the bit, opened at a step, exported both ways, and begun from an adapter."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from resumed_runs import FLAGS, final_state, here, kill, resume, same_run, whole_run  # noqa: F401
from test_main import go

from jaxrl_post import main as command
from jaxrl_post.commands import export
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.models import hf, peft, tensor_file
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

LORA = ("--config.lora.rank=4", "--config.lora.alpha=8.0", "--config.lora.targets=('q_proj','o_proj','up_proj')")


@pytest.fixture(scope="module")
def ended(here):  # noqa: F811
    return whole_run(here, "lora", *LORA)


def logged(folder) -> dict:
    """Returns the log-probs of the greedy rollouts of a run's last evaluation, by the run's engine."""
    from jaxrl_post.runs import rollout_log

    file = sorted((folder / "evaluations").glob("step_*.npz"))[-1]
    return [rollout for group in rollout_log.read(file) for rollout in group.rollouts]


def sampled_again(policy, rollouts) -> bool:
    """Returns whether a policy gives rollouts of an evaluation again, bit for bit."""
    for one in rollouts:
        law = dict(temperature=0.0 if one.id.attempt else 1.0)
        (found,) = policy.sampled([one.prompt], 1, law, one.id.seed()[None, None], 8)[0]
        if found.logprobs.tobytes() != one.logprobs.tobytes() or found.tokens.tobytes() != one.tokens.tobytes():
            return False
    return True


def test_a_checkpoint_holds_additions_alone(ended):
    names = final_state(ended)
    weights = {name.rpartition(".")[2] for name in names if name.startswith("params.policy")}
    assert weights == {f"{name}_{part}" for name in ("q", "o", "up") for part in "ab"}
    assert names["params.base"].shape == (2,)
    assert not any(name.endswith((".embed", ".q", ".final_norm")) for name in names)


@pytest.mark.extended
def test_a_killed_run_goes_on_to_the_bit(here, ended):  # noqa: F811
    target = here / "lora_killed"
    kill(here, target, store, "manifest", 2, flags=LORA)
    assert resume(here, target, *LORA) == 0
    same_run(ended, target)


def test_export_and_engine_agree_bit_for_bit(here, ended):  # noqa: F811
    """The run's own evaluation, its merged export, a merge of its last step, and its adapter over its base."""
    rollouts = logged(ended)
    for name in (ended, f"{ended}@5"):
        assert sampled_again(saved_policy.load(name), rollouts[:4]), name
    assert not sampled_again(saved_policy.load(f"{ended}@4"), rollouts)
    assert export.main([f"--policy={ended}@5", f"--out={here / 'merged'}"]) == 0
    exported, written = (hf.load(place)[1] for place in (here / "merged", ended / "policy"))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(exported), jax.tree.leaves(written), strict=True))
    assert export.main([f"--policy={ended}@5", f"--out={here / 'adapter'}", "--adapter"]) == 0
    for file in (here / "adapter", ended / "adapter"):
        found = {name: tensor_file.read(one) for name, one in tensor_file.entries(file / peft.TENSORS).items()}
        assert len(found) == 2 * 3 * 2 and all(np.abs(value).max() > 0 for value in found.values())
    same = (place / peft.TENSORS for place in (here / "adapter", ended / "adapter"))
    assert len({file.read_bytes() for file in same}) == 1


def test_a_run_begins_from_an_adapter_and_another_base_is_refused(here, ended, capsys):  # noqa: F811
    """On the directory of a policy, so that the base can be changed below a saved step."""
    base = here / "base"
    shutil.copytree(ended / "policy", base)
    on = (f"--config.model.path={base}", "--config.model.preset=", "--config.model.tokenizer=")
    from_it = (*LORA, *on, f"--config.lora.adapter={ended / 'adapter'}", "--config.steps=2")
    target = here / "from_adapter"
    assert resume(here, target, *from_it) == 0
    rollouts = logged(target)
    capsys.readouterr()
    adapter = saved_policy.load(target / "adapter")
    told = json.loads((target / "adapter" / peft.CONFIG).read_text())
    assert told["base_model_name_or_path"] == str(base) and sampled_again(adapter, rollouts[:2])

    model, params = hf.load(base)
    params["final_norm"] = params["final_norm"] * np.float32(1.001)
    hf.save(base, model, params, tokenizer_files=[base / "tokenizer.json"], eos_ids=(0,))
    assert resume(here, target, *from_it[:-1], "--config.steps=4") == 1
    assert "step 2 holds additions to another base than the one here" in capsys.readouterr().err
    with pytest.raises(ValueError, match="step 2 of .* holds additions to another base"):
        saved_policy.files(f"{target}@2")[1].load_params(_shardings(target))


def _shardings(target):
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    model = saved_policy.files(target)[1].model
    return meshes.param_shardings(meshes.make_mesh(), decoder.axes(model), "engine")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--config.lora.targets=('q_proj','up')",), "'up' is not one of q_proj"),
        (("--config.lora.dropout=0.1",), "unknown name 'lora.dropout'"),
        (("--config.lora_dropout=0.1",), "no dropout: log-probs are those of the whole policy"),
        (("--config.engine.layouts=(2,)", "--config.mesh.data=2"), "engine.layouts=(2,) moves all weights"),
        (("--config.lora.rank=0",), "lora.alpha=8.0 would be ignored"),
        (("--config.lora.adapter=nowhere",), "nowhere"),
    ],
)
def test_what_does_not_go_with_it(here, capsys, flags, sentence):  # noqa: F811
    assert go(here, *LORA, *flags) == 1
    assert sentence in capsys.readouterr().err


def test_another_rank_is_no_branch(here, ended, capsys):  # noqa: F811
    flags = (f"--branch={ended}@4", "--config.lora.rank=8", "--config.steps=8", f"--run-dir={here / 'branched'}")
    assert command.main(list(flags)) == 1
    assert "lora.rank 4 -> 8: the weights of step 4 are additions of the first form" in capsys.readouterr().err


def test_a_run_without_additions_has_no_adapter(here, capsys):  # noqa: F811
    full = whole_run(here, "whole")
    assert not (full / "adapter").exists()
    for name in (full, f"{full}@5"):
        assert export.main([f"--policy={name}", f"--out={here / 'none'}", "--adapter"]) == 1
        assert "no adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--config.engine.sleep=True",), marks=pytest.mark.extended),
        pytest.param(("--config.speculation.drafter=ngram",), marks=pytest.mark.shown("variants")),
        pytest.param(("--config.scheduler.mini_batches=2", "--config.steps=6"), marks=pytest.mark.shown("variants")),
    ],
    ids=["sleeping", "drafts", "two_updates"],
)
def test_the_ring_goes_with_it(here, ended, flags):  # noqa: F811
    """A sleeping engine and drafts change no bit. Two updates a round run as before."""
    target = here / f"lora_{flags[0].partition('=')[0].rpartition('.')[2]}"
    assert resume(here, target, *LORA, *flags) == 0
    if len(flags) == 1:
        states = [final_state(folder) for folder in (ended, target)]
        assert all(leaf.tobytes() == states[1][name].tobytes() for name, leaf in states[0].items())
    assert (target / "adapter" / peft.CONFIG).is_file()


@pytest.mark.parametrize(
    "flags, case",
    [
        pytest.param(("--config.mesh.engine=1",), "relayout and merge", marks=pytest.mark.shown("variants")),
        pytest.param(
            ("--config.mesh.fsdp=2", "--config.mesh.engine_tensor=2"),
            "relayout and merge",
            marks=pytest.mark.shown("variants"),
        ),
        pytest.param(("--config.scheduler.name=pipeline",), "merge", marks=pytest.mark.extended),
    ],
    ids=["split", "sharded", "pipeline"],
)
def test_other_layouts_and_a_pipeline(here, flags, case):  # noqa: F811
    target = here / f"lora_{len(flags)}_{case[:3]}"
    assert resume(here, target, *LORA, *flags) == 0
    assert json.loads((target / "summary.json").read_text())["swap"]["case"] == case
    assert np.isfinite(
        [leaf.sum() for name, leaf in final_state(target).items() if name.startswith("params.pol")]
    ).all()
