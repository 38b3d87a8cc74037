"""Every shipped config runs: two short steps of each, on as many devices as it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_post import config, main
from jaxrl_post.runs import metric_rows

# README's config trains in the first tier (test_docs.py)
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.extended]

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SHORT = (
    "--config.steps=2",
    "--config.scheduler.prompts=4",
    "--config.scheduler.group_size=4",
    "--config.eval.prompts=4",
    "--config.eval.samples=2",
    "--config.eval.every=1",
)
ENGINE = ("--config.engine.slots=16", "--config.engine.row_sizes=(32,)")
SMALL = (*ENGINE, "--config.data.size=64")  # one engine for all configs of a model, and few rows to draw
AS_SHIPPED = ("demo", "demo/sharded", "demo/moe", "own")  # with the engine and the rows of their file


PRESETS = {  # with what makes two steps of theirs short
    "recipes/grpo": (),
    "recipes/dr_grpo": (),
    "recipes/dapo": (),
    "recipes/reinforce_plus_plus": (),
    "recipes/gspo": ("--config.scheduler.mini_batches=2",),
    "recipes/cispo": ("--config.scheduler.mini_batches=2",),
    "recipes/sapo": ("--config.scheduler.mini_batches=1",),
    "recipes/remax": (),
    "recipes/gmpo": ("--config.scheduler.mini_batches=2",),
    "recipes/dppo": ("--config.scheduler.mini_batches=2",),
    "recipes/dro": ("--config.scheduler.mini_batches=2",),
    "recipes/clip_cov": ("--config.scheduler.mini_batches=2",),
    "recipes/kl_cov": ("--config.scheduler.mini_batches=2",),
    "recipes/high_entropy": (),
    "recipes/deepseek_v3_2": ("--config.scheduler.mini_batches=2",),
    "recipes/vapo": ("--config.critic.warmup_steps=1",),
    "recipes/gdpo": (),
    "recipes/rae": (),
    "recipes/otb": (),
    "demo/ppo": ("--config.critic.warmup_steps=1",),
    "recipes/ppo": ("--config.critic.warmup_steps=1", "--config.scheduler.mini_batches=1"),
    "recipes/ppo_value_head": ("--config.critic.warmup_steps=1",),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_runs(name, tmp_path):
    more = PRESETS[name]
    _runs(name, tmp_path, *SMALL, *more, *(["--config.eval.every=2"] if more else []))


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "demo/curriculum",
        "demo/mixed",
        "demo/judge",
        "demo/sft",
        "demo/judge_sft",
        "demo/dpo",
        "demo/ipo",
        "demo/sharded",
        "demo/shuffled",
        "demo/moe",
        "demo/nucleus",
        "demo/shared_prompts",
        "demo/eight_bits",
        "demo/rounded",
        "demo/row_sizes",
        "own",
    ],
)
def test_config_runs(name, tmp_path):
    size = {"demo/sft": 1, "demo/judge_sft": 1, "demo/dpo": 2, "demo/ipo": 2}.get(name)
    more = (f"--config.scheduler.group_size={size}", "--config.optimizer.warmup_steps=1") if size else ()
    _runs(name, tmp_path, *(() if name in AS_SHIPPED else SMALL), *more)


@pytest.mark.parametrize("name", ["demo/distill", "demo/distill_start"])
def test_distillation_runs(name, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt_id": f"{k}", "prompt": f"1{k}+2+3=", "text": f"#1{k + 5}"}) + "\n" for k in range(5)
        )
    )
    start = (f"--config.data.train={tmp_path / 'rows.jsonl'}", "--config.optimizer.warmup_steps=1")
    more = (*ENGINE, *start) if name == "demo/distill_start" else SMALL
    teacher = f"--config.teacher.path={CONFIGS / 'demo_policy'}"
    _runs(name, tmp_path, "--config.scheduler.group_size=1", teacher, *more)


@pytest.mark.parametrize("name", ["demo/conversations_sft", "sft"])
def test_rows_are_trained_on(name, tmp_path):
    assert main.main([f"--config={CONFIGS / name}.py", f"--run-dir={tmp_path / 'run'}"]) == 0
    losses = [
        row["actor/pg_loss"] for row in metric_rows.read(tmp_path / "run" / "metrics.jsonl") if "actor/pg_loss" in row
    ]
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["demo/tail_batching", "demo/rollpacker", "demo/partial"])
def test_races_run(name, tmp_path):
    _runs(name, tmp_path, *(["--config.scheduler.stream=2"] if name == "demo/partial" else []))


@pytest.mark.parametrize("name", ["models/stories", "models/stories_sharded"])
def test_stories_runs(name, data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_DATA", str(data_dir))
    _runs(name, tmp_path, "--config.eval.at=[1]")


def _runs(name: str, folder: Path, *more: str) -> None:
    config.resolve(config.load(str(CONFIGS / f"{name}.py")))  # as it is shipped
    assert main.main([f"--config={CONFIGS / name}.py", f"--run-dir={folder / 'run'}", *SHORT, *more]) == 0
    rows = metric_rows.read(folder / "run" / "metrics.jsonl")
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 <= row["actor/grad_norm"] < 1e6 for row in steps)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["eval"]["after"]["n"] == 4
    assert (folder / "run" / "policy" / "model.safetensors").is_file()
