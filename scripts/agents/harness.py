"""A harness that plays the calculator in the sessions of a run, all of them at the same time, by OpenAI's client.

    JAXRL_POST_TOKEN=TOKEN python scripts/agents/harness.py --url=http://127.0.0.1:8100 [--name=NAME] [--patience=SECONDS] [--late=SECONDS]

It imports no part of the project: it knows the run by its endpoint alone (docs/agents.md). It ends with 0 when the run has
ended, and with 1 when the run cannot be reached for --patience seconds. With --late it thinks before it follows a turn. Its
first line says how many sessions it takes over from an earlier process of its name, its last one what it has played.

Invariant: what it puts behind a turn follows from the session's row and the turn alone. So another process may play a
session again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections import Counter

import openai
from openai.types.chat import ChatCompletion

DIGITS = 8  # of a number that the calculator takes
WAIT_S = 20.0  # of a request for sessions
MOST = 256  # sessions that are taken at a time
GONE = (404, 409, 410)  # the session has ended, or another harness has played it
LATE = 408  # the turn is not sampled yet
TURN_S = 660.0  # of a request for a turn, which the run itself ends after 600
_OPERATION = re.compile(r"(-?[0-9]+)([+*-])(-?[0-9]+)")


def computed(expression: str) -> str:
    """Returns the result of one operation of two whole numbers, or "?" for anything else."""
    found = _OPERATION.fullmatch(expression.replace(" ", ""))
    if found is None or any(len(found[place]) > DIGITS for place in (1, 3)):
        return "?"
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[found[2]])


class Harness:
    """Takes sessions and plays each in a task of its own."""

    def __init__(self, client: openai.AsyncOpenAI, flags: argparse.Namespace):
        self._client = client
        self._name, self._patience_s, self._late_s = flags.name, flags.patience, flags.late
        self.counts: Counter[str] = Counter()

    async def turn(self) -> None:
        """Plays sessions until the run has ended. Sessions that a process of this name left behind are played anew."""
        given = await self._asked("/v1/sessions/release", {"harness": self._name})
        print(json.dumps({"released": given.get("released", 0)}), flush=True)
        async with asyncio.TaskGroup() as tasks:
            while not (given.get("ended") or self.counts["gone"]):
                given = await self._asked("/v1/sessions", {"harness": self._name, "most": MOST, "wait": WAIT_S})
                for session in given.get("sessions", ()):
                    tasks.create_task(self._play(session))

    async def _asked(self, path: str, body: dict) -> dict:
        """Returns the response. While the run is away, as from a kill until its resume, it is asked again for a while."""
        end = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._posted(path, body)
            except openai.APIConnectionError:
                if time.monotonic() > end:
                    self.counts["gone"] = 1
                    return {}
                self.counts["away"] += 1
                await asyncio.sleep(0.2)

    async def _posted(self, path: str, body: dict) -> dict:
        """Returns the response to one of the endpoint's own words."""
        return await self._client.post(path, cast_to=dict[str, object], body=body)

    async def _play(self, session: dict) -> None:
        """Plays a session from its present turn on. One that has ended meanwhile is left."""
        self.counts["sessions"] += 1
        try:
            await self._played(session)
        except openai.APIStatusError as refused:
            if refused.status_code not in GONE:
                raise
            self.counts["cut"] += 1
        except openai.APIConnectionError:
            self.counts["lost"] += 1  # the run is away; it will offer its sessions again

    async def _played(self, session: dict) -> None:
        own = self._client.with_options(base_url=session["base_url"])
        messages = list(session["messages"])
        while True:
            response = await self._spoken(own, session["model"], messages)
            self.counts["turns"] += 1
            await asyncio.sleep(self._late_s)
            said = response.choices[0].message.content
            if said.startswith("#"):
                return await self._reward(session, float(said[1:] == str(session["row"]["answer"])))
            told = computed(said[:-1]) if said.endswith("=") else "?"
            messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": told}]

    async def _spoken(self, own: openai.AsyncOpenAI, model: str, messages: list) -> ChatCompletion:
        """Returns the policy's turn. One that is long in coming is asked for again."""
        while True:
            try:
                return await own.chat.completions.create(model=model, messages=messages, timeout=TURN_S)
            except openai.APIStatusError as refused:
                if refused.status_code != LATE:
                    raise
                self.counts["waits"] += 1

    async def _reward(self, session: dict, right: float) -> None:
        await self._posted(f"/sessions/{session['id']}/reward", {"reward": right, "components": {"acc": right}})
        self.counts["rewards"] += 1


async def played(flags: argparse.Namespace) -> Counter[str]:
    """Plays until the run has ended, and returns the counts."""
    async with openai.AsyncOpenAI(api_key=os.environ["JAXRL_POST_TOKEN"], base_url=flags.url, max_retries=0) as client:
        harness = Harness(client, flags)
        await harness.turn()
        return harness.counts


def main() -> int:
    words = argparse.ArgumentParser(prog="harness")
    words.add_argument("--url", required=True)
    words.add_argument("--name", default="calculator")
    words.add_argument("--patience", type=float, default=60.0)
    words.add_argument("--late", type=float, default=0.0)
    counts = asyncio.run(played(words.parse_args()))
    print(json.dumps(counts), flush=True)
    return counts["gone"]


if __name__ == "__main__":
    sys.exit(main())
