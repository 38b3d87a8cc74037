"""configs/models/gsm8k_qwen2_5_0_5b.py on a Qwen2 checkpoint of two small layers: real rows, template and scorers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post import config, main
from jaxrl_post.data import tokenizer
from jaxrl_post.models import hf
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.runs import metric_rows, rollout_log

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).resolve().parents[1]
SHAPE = dataclasses.replace(
    PRESETS["qwen2_5_0_5b"], embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffw=64, vocab_size=5000, windows=()
)
SUFFIX = ' Let\'s think step by step and output the final answer after "####".'


@pytest.mark.extended
@pytest.mark.slow  # trains a tokenizer, reads 8,792 rows and compiles a run
def test_two_steps_on_real_rows(data_dir, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gsm8k_shape", ROOT / "scripts" / "shows" / "gsm8k_shape.py")
    show = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(show)
    model = tmp_path / "models" / "Qwen2.5-0.5B-Instruct"
    show.make(model, data_dir / "gsm8k", SHAPE)
    assert hf.read_config(model / "config.json") == SHAPE and "Qwen2ForCausalLM" in (model / "config.json").read_text()
    monkeypatch.setenv("JAXRL_MODELS", str(model.parent))
    monkeypatch.setenv("JAXRL_DATA", str(data_dir))
    file, run = ROOT / "configs" / "models/gsm8k_qwen2_5_0_5b.py", tmp_path / "run"
    (tmp_path / "reward.py").write_text(show.REWARD)
    paid = ["jaxrl_post.rewards.math:strict", "jaxrl_post.rewards.math:flexible", f"{tmp_path / 'reward.py'}:odd"]
    flags = [f"--config.{one}" for one in (*show.SMALL, f"reward.functions={paid}", "reward.weights=[1.0, 0.0, 0.1]")]
    assert main.main([f"--config={file}", f"--run-dir={run}", *flags]) == 0

    words = tokenizer.load(model)
    assert [words.model.id_to_token(i) for i in words.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    steps = [row for row in metric_rows.read(run / "metrics.jsonl") if "actor/grad_norm" in row]
    assert len(steps) == 2 and all(row["actor/grad_norm"] > 0 and row["reward/unscored"] == 0 for row in steps)
    asked = {
        row["question"]: row["answer"]
        for row in map(json.loads, (data_dir / "gsm8k" / "train.jsonl").read_text().splitlines())
    }
    for group in rollout_log.read(sorted((run / "rollouts").glob("*.npz"))[0]):
        text = words.decode(group.prompt.tokens, skip_special=False)
        head, tail = "<|im_start|>user\n", f"{SUFFIX}<|im_end|>\n<|im_start|>assistant\n"
        assert text.startswith(head) and text.endswith(tail)
        assert group.prompt.answer == asked[text[len(head) : -len(tail)]]
        odd = [float(np.mean(rollout.tokens % 2)) for rollout in group.rollouts]
        np.testing.assert_allclose(group.components["odd/score"], odd, rtol=1e-6)
        np.testing.assert_allclose(group.rewards, group.components["strict/score"] + 0.1 * np.array(odd), rtol=1e-6)


def test_the_config_without_the_model_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXRL_MODELS", str(tmp_path))
    assert main.main([f"--config={ROOT / 'configs' / 'models/gsm8k_qwen2_5_0_5b.py'}", "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Qwen2.5-0.5B-Instruct" in said, said


def test_the_recipe_holds_what_its_docstring_says():
    c = config.resolve(config.load(str(ROOT / "configs" / "models/gsm8k_qwen2_5_0_5b.py")))
    assert c.rollouts_per_step == 128 * 8 and c.algorithm.adv_estimator == "grpo" and c.algorithm.kl_loss_coef == 0
    assert c.engine.max_length - c.sampling.max_tokens == 512 == c.sampling.max_tokens
    assert c.steps == 3 * 7473 // 128 - 1
