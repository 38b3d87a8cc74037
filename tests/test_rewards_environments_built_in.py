"""The environments that are built in, and the adapter for those of verifiers: every reply and score is known by hand."""

from __future__ import annotations

import pytest

from jaxrl_post.rewards.environments.calculator import Calculator, CalculatorTool
from jaxrl_post.rewards.environments.code_tool import CodeTool
from jaxrl_post.rewards.environments.grid_world import GridWorld
from jaxrl_post.rewards.environments.guessing import Guessing
from jaxrl_post.rewards.environments.verifiers import Adapter


def play(environment, columns: dict, *texts: str) -> list:
    """Returns (contents, reward, done) of each turn."""
    messages, out = list(environment.reset(columns)), []
    for text in texts:
        messages.append(text if isinstance(text, dict) else {"role": "assistant", "content": text})
        more, reward, done, _ = environment.step(messages)
        messages += more
        out.append(([m["content"] for m in more], reward, done))
    return out


def test_calculator():
    columns = {"prompt": "12*3+4=", "answer": "40"}
    assert play(Calculator(), columns, "12*3=", "36+4=", "#40") == [
        (["36"], 0.0, False),
        (["40"], 0.0, False),
        ([], 1.0, True),
    ]
    assert play(Calculator(), columns, "#41") == [([], 0.0, True)]
    assert play(Calculator(), columns, "12**3=", "", "9" * 40 + "*2=") == [(["?"], 0.0, False)] * 3


def test_calculator_by_tool_calls():
    call = {"id": "abc", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "12 * 3"}}}
    wrong = {"id": "abd", "type": "function", "function": {"name": "search", "arguments": {}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call, wrong]}
    columns = {"prompt": "12*3+4=", "answer": "40"}
    told = play(CalculatorTool(), columns, turn, "It is 40, not 36 or 40")
    assert told[0] == (["36", "there is no tool 'search'; use calculator"], 0.0, False)
    assert told[1] == ([], 1.0, True)


def test_guessing():
    assert play(Guessing(), {"secret": 20}, "32", "x", "16", "20") == [
        (["high"], 0.0, False),
        (["?"], 0.0, False),
        (["low"], 0.0, False),
        ([], 1.0, True),
    ]


def test_grid_world():
    told = play(GridWorld(), {"start": "12", "goal": "20"}, "d", "x", "d", "d", "r")
    assert [words for words, _, _ in told] == [["11,20"], ["11,20"], ["10,20"], ["10,20"], []]
    assert told[-1][1:] == (1.0, True)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:This process:DeprecationWarning")
def test_code_tool():
    columns = {"prompt": "Double a number.", "test_list": ["assert double(2) == 4", "assert double(-1) == -2"]}
    told = play(CodeTool(), columns, "def double(x): return 4", "```python\ndef double(x): return 2 * x\n```")
    assert told == [(["Test 2 of 2 fails: assert double(-1) == -2"], 0.0, False), ([], 1.0, True)]


class Score:
    reward, metrics = 0.5, {"format": 1.0}


class LikeVerifiers:
    """Version 0.1's shape: async methods, a rubric, a limit of turns."""

    oai_tools = ({"type": "function", "function": {"name": "f"}},)

    def __init__(self, max_turns):
        self.max_turns, self.rubric = max_turns, self

    async def is_completed(self, messages, state):
        return "stop" in messages[-1]["content"]

    async def env_response(self, messages, state):
        return [{"role": "user", "content": f"{state['turn']} {len(state['completion'])}"}], state

    async def score_rollout(self, prompt, completion, answer, state):
        assert completion[0]["role"] == "assistant" and answer == "7"
        return Score


def test_verifiers(monkeypatch):
    def adapter(most):
        return Adapter(load=f"{__name__}:LikeVerifiers", options={"max_turns": most})

    columns = {"prompt": [{"role": "user", "content": "q"}], "answer": "7"}
    assert adapter(9).tools[0]["function"]["name"] == "f"
    assert play(adapter(9), columns, "a", "b", "stop") == [
        (["1 1"], 0.0, False),
        (["2 3"], 0.0, False),
        ([], 0.5, True),
    ]
    assert play(adapter(2), columns, "a", "b")[-1] == ([], 0.5, True)
