"""Programs that are judged in the sandbox, turn by turn: the policy writes one, is told which test fails, and tries again.

Rows have tests in any of the forms of rewards/program_tests.py: in the column `test_list` or `test`, or as the ground truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrl_post.rewards import code, program_tests
from jaxrl_post.rewards.sandbox import AUTO


class CodeTool:
    """A program that passes every test scores 1 and ends the conversation.

    Args:
      limit_s: CPU seconds that a program may take for one test.
      sandbox: level of confinement (rewards/sandbox).
    """

    def __init__(self, limit_s: float = 5.0, sandbox: str = AUTO):
        self._limit_s, self._sandbox = limit_s, code.sandbox_at(sandbox)

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the problem.

        Raises:
          ValueError: the row has no tests, or some that test nothing of a program.
        """
        if why := program_tests.refusal(row.get("answer", ""), row):
            raise ValueError(why)
        self._tests = program_tests.read(row.get("answer", ""), row)
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
