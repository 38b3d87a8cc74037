"""A run's judge: its questions have the tokens, the noise and the law of the same question to a server, or are refused."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_post import config as configs
from jaxrl_post.data import chat
from jaxrl_post.launch.parts import inputs, judges, second_models
from jaxrl_post.ring.types import Finish, Prompt, Rollout, RolloutId
from jaxrl_post.serve.prompts import Reading
from jaxrl_post.serve.request_bodies import SamplingRequest

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TEXTS = {1: "#9", 2: "4+5=9#9", 3: "#" * 300, 4: "no words of the judge"}


def given(*overrides: str) -> configs.Config:
    return configs.resolve(configs.load(str(CONFIGS / "demo/judge.py")), overrides)


def decode(tokens, before=()) -> str:
    return "4+5=" if len(tokens) == 4 else TEXTS[int(tokens[0])]


@pytest.fixture(scope="module")
def files():
    return inputs.policy(second_models.judge_settings(given()))


@contextlib.contextmanager
def asking(files, *overrides: str, train=None):
    start = SimpleNamespace(
        judge=files, tokenizer=SimpleNamespace(decode=decode), train=train or (prompt(),), held_out=()
    )
    with contextlib.ExitStack() as stack:
        yield judges.questions(given(*overrides), start, stack)


def prompt(**more) -> Prompt:
    return Prompt(id="p", tokens=[4, 5, 6, 7], answer="9", **more)


def rollout(number: int, asked: Prompt | None = None) -> Rollout:
    return Rollout.written(RolloutId(0, "train", 0, "p", number), asked or prompt(), [number], Finish.EOS)


def test_a_question_is_that_of_a_server(files):
    """Tokens, id, noise and law, compared with what serve/ makes of a chat request with seed 0."""
    template = chat.load(files.place)
    reading = Reading(files.tokenizer, template, 128, tools=False)
    text = "4+5= 4+5=9#9"
    served = reading.prompts(SamplingRequest(messages=({"role": "user", "content": text},)))[0]
    reading.close()
    with asking(files) as ask:
        request = ask(rollout(2))
        assert ask(rollout(2)).rollout_id == request.rollout_id != ask(rollout(1)).rollout_id
    assert files.tokenizer.decode(request.prompt.tokens) == text + ">"
    np.testing.assert_array_equal(request.prompt.tokens, served.tokens)
    assert request.prompt.id == served.id and request.purpose == "judge"
    np.testing.assert_array_equal(request.seed, RolloutId(0, "eval", 0, served.id, 0).seed())
    assert request.sampling.temperature == 0 and request.sampling.eos_ids == files.tokenizer.eos_ids
    assert request.max_tokens == 16


def test_the_task_is_its_column_the_last_message_or_the_prompt(files):
    with asking(files) as ask:
        for asked, task in (
            (prompt(), "4+5="),
            (prompt(extra={"task": "1+1="}), "1+1="),
            (prompt(messages=({"role": "user", "content": "7+7="},)), "7+7="),
        ):
            assert files.tokenizer.decode(ask(rollout(1, asked)).prompt.tokens) == f"{task} #9>"
    with asking(files, "judge.question={truth} {answer}") as ask:
        assert files.tokenizer.decode(ask(rollout(1)).prompt.tokens) == "9 #9>"


def test_a_question_that_cannot_be_asked_is_none(files):
    """It is too long, or has characters that the judge has no token for."""
    with asking(files) as ask:
        assert ask(rollout(3)) is None and ask(rollout(4)) is None


def test_a_reply_gets_the_positions_that_are_left(files):
    with asking(files, "judge.max_length=20", "judge.max_tokens=19") as ask:
        assert ask(rollout(1)).max_tokens == 20 - len("4+5= #9>")


def test_without_a_template_the_question_is_plain_text(files, tmp_path):
    shutil.copytree(files.place, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    own = inputs.policy(second_models.judge_settings(given(f"judge.model={tmp_path / 'plain'}")))
    with asking(own) as ask:
        assert own.tokenizer.decode(ask(rollout(1)).prompt.tokens) == "4+5= #9"


def test_what_is_refused_before_anything_is_compiled(files, tmp_path):
    with (
        pytest.raises(
            ValueError, match=r"judge.question: without a rollout, prompt 'p' makes a question of 6 tokens, and jud"
        ),
        asking(files, "judge.max_length=6", "judge.max_tokens=5"),
    ):
        pass
    with pytest.raises(ValueError, match="no such folder with a config.json"):
        second_models.judge_settings(given(f"judge.model={tmp_path}"))
    with pytest.raises(ValueError, match="engine.max_length=4096 is beyond the model's 128 positions"):
        inputs.policy(second_models.judge_settings(given("judge.max_length=4096")))


def test_its_weights_belong_to_the_run(tmp_path):
    shutil.copytree(CONFIGS / "judge_policy", tmp_path / "judge")
    one = second_models.judge_digest(given(f"judge.model={tmp_path / 'judge'}"))
    file = tmp_path / "judge" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert (
        list(one) == ["judge.model"] and second_models.judge_digest(given(f"judge.model={tmp_path / 'judge'}")) != one
    )
    assert second_models.judge_digest(given("judge.model=", "judge.question=", "judge.high=1", "judge.weight=1",
                                    "judge.max_length=1024", "judge.max_tokens=64")) == {}  # fmt: skip
