"""Whole runs with a teacher: killed and resumed bit for bit, refused with another teacher, and logged by slime's name."""

import shutil

import numpy as np
import pytest
from resumed_runs import here, kill, resume, same_run, whole_run  # noqa: F401  (a fixture, and its kin)

from jaxrl_post.launch.parts.inputs import tokenizer_files
from jaxrl_post.models import decoder, hf
from jaxrl_post.runs import metric_rows
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = decoder.ModelConfig(
    vocab_size=24, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffw=24, max_length=64, tied=False
)
FORMS = {
    "sampled": ("--config.algorithm.adv_estimator=distill", "--config.scheduler.mini_batches=2", "--config.steps=6"),
    "exact": ("--config.algorithm.adv_estimator=distill", "--config.algorithm.loss_mode=gkd"),
    "beside": ("--config.algorithm.opd_kl_coef=0.5", "--config.scheduler.stream=2"),
}


def saved(folder, name: str, seed: int):
    """A teacher of another shape and size than the policy."""
    hf.save(folder / name, MODEL, decoder.init(MODEL, seed), dtype="float32")
    for file in tokenizer_files(folder / "tokenizer"):
        shutil.copyfile(file, folder / name / file.name)
    return f"--config.teacher.path={folder / name}"


@pytest.mark.parametrize(
    "form", ["exact", *(pytest.param(n, marks=pytest.mark.shown("variants")) for n in ("sampled", "beside"))]
)
def test_killed_in_a_save_and_resumed_it_is_the_same_run(here, form, capsys):  # noqa: F811
    flags = (*FORMS[form], saved(here, "teacher", 7))
    whole, target = whole_run(here, f"whole_{form}", *flags), here / f"killed_{form}"
    rows, key = metric_rows.read(whole / "metrics.jsonl"), "rollout/opd_reverse_kl"
    found = [row[key] for row in rows if key in row]  # one of each round, which may be several steps
    assert np.isfinite(found).all() and len(set(found)) == len(found) >= 3
    assert form != "exact" or found[-1] < found[0]
    kill(here, target, store, "manifest", 2, flags=flags)
    saved(here, "teacher", 8)  # other weights below the same name
    capsys.readouterr()
    assert resume(here, target, *flags) == 1
    assert "resume refused: teacher " in capsys.readouterr().err
    saved(here, "teacher", 7)
    assert resume(here, target, *flags) == 0
    same_run(whole, target)
