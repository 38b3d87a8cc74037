"""Programs that are judged in the sandbox, turn by turn: the policy writes one, is told which test fails, and tries again.

Rows have the column `test_list` with Python statements, and may have `test_setup_code` (MBPP's columns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrl_post.rewards import code
from jaxrl_post.rewards.sandbox import AUTO
from jaxrl_post.rewards.sandbox.examiner import ProgramTest


class CodeTool:
    """A program that passes every test scores 1 and ends the conversation.

    Args:
      limit_s: CPU seconds that a program may take for one test.
      sandbox: level of confinement (rewards/sandbox).
    """

    def __init__(self, limit_s: float = 5.0, sandbox: str = AUTO):
        self._limit_s, self._sandbox = limit_s, code.sandbox_at(sandbox)

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the problem."""
        setup = str(row.get("test_setup_code") or "")
        self._tests = [ProgramTest(str(test), setup=setup) for test in row["test_list"]]
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]

    def step(self, messages: Sequence[Mapping]) -> tuple[list[dict], float, bool, dict]:
        """Returns the first test that the program in the last code fence fails, or the score."""
        program = code.code(messages[-1]["content"])
        for passed, test in enumerate(self._tests):
            verdict, _ = code.judged(self._sandbox, program, test, self._limit_s)
            if verdict != "passed":
                words = "takes too long" if verdict == "overrun" else "fails"
                seen = {"role": "user", "content": f"Test {passed + 1} of {len(self._tests)} {words}: {test.source}"}
                return [seen], 0.0, False, {"acc": 0.0, "passed": passed / len(self._tests)}
        return [], 1.0, True, {"acc": 1.0, "passed": 1.0}
