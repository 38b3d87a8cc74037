"""A supervised and an RL loop of the Tinker SDK learn on the demo policy, and two clients at once get the bits of each alone.

The SDK, at the version of docs/tinker.md, runs in an environment of its own below .cache/peers/. It reaches
`python -m jaxrl_post tinker`, and no hub: the tokenizer is the policy's own.

- supervised, rl: scripts/tinker_loops.py runs loops written after the SDK's documentation. The loss falls, the reward rises.
- scored: log-probs, losses and norms of gradients are compared with this project's learner, which is called directly with the
  same tokens, in another process.
- small: every number of two clients, alone and at the same time.
- killed: a client is killed while it trains. Its session ends, its runs are freed, and the others' bits are as before.
- knowing: a client with a key of its own tries what it can with every name of another's, also after the server has begun anew.
- values: what no engine may meet, beside a client that asks for /healthz.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hostile_clients
import jax
import numpy as np
import peers
from record import Missing
from strangers import requests

from jaxrl_post import config
from jaxrl_post.algorithms.credit import Credit
from jaxrl_post.data import tasks, tokenizer
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.parallel import mesh
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.trainer import packing, placement, programs

MINUTES = 8.0
PLATFORM = "cpu"
SDK, PINS = "tinker==0.24.1", "constraints/tinker.txt"
SOURCES = ("scripts/tinker_loops.py", "scripts/hostile_clients.py", "configs/demo_policy/*")
TRIES, HEALTH_S = 500, 1.0
POLICY, KEY, IDLE_S, LIMIT_S = "configs/demo_policy", "tml-of-the-show", 30, 1200.0
LEARNED = {
    "cross_entropy": ("sft", {}, {}),
    "importance_sampling": ("vanilla", {"clip_ratio_low": 1.0, "clip_ratio_high": 1e6}, {}),
    "ppo": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, {}),
    "cispo": ("cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, {}),
    "dro": ("dro", {"old_kl_coef": 0.3}, {"beta": 0.3}),
}


def show(record) -> None:
    try:
        python = peers.environment(record.root, "tinker", [f"-c {record.root / PINS} {SDK}"])
    except subprocess.CalledProcessError as error:
        raise Missing(f"tinker: the SDK {SDK} cannot be installed: pip exited with {error.returncode}") from error
    problems, solved = _sums()
    data = _data(solved)
    needs = {loss: ["weights"] if loss == "cross_entropy" else ["logprobs", "advantages"] for loss in LEARNED}
    losses = {loss: {"needs": needs[loss], "config": LEARNED[loss][2] or None} for loss in LEARNED}
    with tempfile.TemporaryDirectory() as folder, _Server(record, Path(folder)) as server:
        sdk = _Sdk(record, python, Path(folder), server.port)
        learning = dict(steps=12, batch=32, rate=3e-3, rank=32)
        found = sdk.run(
            supervised={"solved": solved, **learning},
            rl={"problems": problems, "steps": 12, "prompts": 16, "group": 8, "rate": 2e-3, "rank": 32},
            scored={"data": data, "losses": losses, "rank": 0},
            refused={"data": data},
        )
        record.figure("sdk", found["sdk"], equals=SDK.partition("==")[2])
        _learned(record, found)
        _scores(record, data, found["scored"])
        _refusals(record, found["refused"])
        _bits(record, sdk, problems, server)
    with tempfile.TemporaryDirectory() as folder:
        _hostile(record, Path(folder))


def _learned(record, found: dict) -> None:
    losses, rewards = found["supervised"]["losses"], found["rl"]["rewards"]
    record.figure("supervised.first_loss", losses[0])
    record.figure("supervised.last_loss", losses[-1])
    record.figure("supervised.last_over_first", losses[-1] / losses[0], at_most=0.7)
    record.figure("rl.rewards", rewards)
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    record.figure("rl.first_reward", first)
    record.figure("rl.last_reward", last)
    record.figure("rl.gain", last - first, at_least=0.2)


def _refusals(record, said: list[str]) -> None:
    record.figure("refused.requests", len(said), equals=7)
    record.figure("refused.without_a_sentence", [one for one in said if len(one) < 20 or "Traceback" in one], equals=[])
    record.figure("refused.sentences", said)


def _sums() -> tuple[list, list]:
    """Returns problems with their results, and problems with careful solutions."""
    sums, seed = tasks.TASKS["sums"], np.zeros(2, np.uint32)
    problems = [[row["prompt"], row["answer"]] for row in sums.rows(0, "train", 240)]
    solved = [
        [row["prompt"], sums.demonstrate({**row["extra"], "careful": 1.0}, seed)] for row in sums.rows(0, "sft", 320)
    ]
    return problems, solved


def _data(solved: list) -> list[dict]:
    """Returns texts of tokens, and numbers for their losses. Ratios lie around 1, on both sides of the bounds."""
    words, dice, out = tokenizer.load(Path(POLICY)), np.random.default_rng(0), []
    for prompt, solution in solved[:24]:
        tokens = words.encode(prompt + solution)
        count = len(tokens) - 1
        floats = {"weights": dice.random(count), "advantages": dice.standard_normal(count)}
        floats["logprobs"] = 0.3 * dice.standard_normal(count)
        out.append({"tokens": tokens} | {name: np.float32(one).tolist() for name, one in floats.items()})
    for one, own in zip(out, _directly(out, "cross_entropy")[0], strict=True):
        one["logprobs"] = np.float32(own + one["logprobs"]).tolist()
    return out


# ---- this project's learner, called directly


def _scores(record, data: list[dict], found: dict) -> None:
    """Compares what the SDK got with the learner's own programs on the same tokens."""
    for loss in LEARNED:
        logprobs, total, norm = _directly(data, loss)
        theirs = found[loss]
        gaps = [np.abs(np.float64(one) - own).max() for one, own in zip(theirs["logprobs"], logprobs, strict=True)]
        record.figure(f"scored.{loss}.logprob_gap", float(max(gaps)), at_most=1e-6)
        record.figure(f"scored.{loss}.loss", theirs["loss"])
        # Terms of both signs cancel in a sum, so the gap is measured by the number of terms and not by what is left.
        tokens = sum(map(len, theirs["logprobs"]))
        record.figure(f"scored.{loss}.loss_gap_per_token", abs(theirs["loss"] - total) / tokens, at_most=1e-6)
        record.figure(f"scored.{loss}.relative_gradient_norm_gap", abs(theirs["norm"] - norm) / norm, at_most=1e-5)


def _directly(data: list[dict], loss: str) -> tuple[list[np.ndarray], float, float]:
    """Returns log-probs, the summed loss and the norm of its gradient by trainer/programs.py and trainer/packing.py."""
    mode, bounds, _ = LEARNED[loss]
    _, files = saved_policy.files(POLICY)
    one = mesh.make_mesh()
    params = files.load_params(placement.of_policy(files.model, one)[0])
    rows = config.BatchConfig(rows=8, tokens=128)
    how = dict(temperature=1.0, remat=None, scan_layers="no", dtype="float32", attention=None)
    algorithm = config.AlgorithmConfig(loss_mode=mode, **bounds)
    recipe = programs.recipe(files.model, algorithm, config.OptimizerConfig(), rows, one, **how)
    groups, credits, old = _groups(data, weighted=loss == "cross_entropy")
    options = dict(leaves=["corrections"]) if mode == "sft" else dict(given={"old_logprobs": old})
    (batch,), places = packing.pack(groups, credits, rows=len(data), tokens=rows.tokens, **options)
    sums, logps = jax.jit(
        lambda p, b: programs.accumulate(p, programs.empty(p, b, recipe), b, recipe, np.bool_(False))
    )(params, batch)
    norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(jax.device_get(sums.grads))))
    found = packing.per_rollout([np.asarray(logps)], places)
    return [found[group.rollouts[0].id] for group in groups], float(sums.by_count["actor/pg_loss"]), float(norm)


def _groups(data: list[dict], *, weighted: bool) -> tuple[list, dict, dict]:
    """Returns a group of one rollout for each text, its credit, and the sampler's log-probs, by rollout id."""
    groups, credits, old = [], {}, {}
    for place, one in enumerate(data):
        prompt = Prompt(id=str(place), tokens=one["tokens"][:1])
        name = RolloutId(0, "train", 0, prompt.id, 0)
        rollout = Rollout.written(name, prompt, np.array(one["tokens"][1:]), Finish.LENGTH)
        groups.append(Group(prompt=prompt, rollouts=(rollout,), rewards=np.zeros(1), scored=np.ones(1, bool)))
        correction = np.float32(one["weights"]) if weighted else None
        gains = np.float32(one["advantages"])
        credits[name] = Credit(advantages=gains, weight=1.0, count=1, correction=correction, reward=0.0)
        old[name] = np.float32(one["logprobs"])
    return groups, credits, old


# ---- equal bits


def _bits(record, sdk, problems: list, server) -> None:
    """Runs two clients alone, together, and after a third one was killed."""
    cases = [dict(problems=problems, seed=1, steps=2, rank=16), dict(problems=problems, seed=2, steps=2, rank=0)]
    alone = [sdk.run(small=case)["small"] for case in cases]
    together = [one["small"] for one in sdk.together([{"small": case} for case in cases])]
    record.figure("bits.numbers", sum(_count(one) for one in alone), at_least=1500)
    record.figure("bits.clients_at_once", len(together), equals=2)
    record.figure("bits.clients_that_differ_from_alone", sum(a != b for a, b in zip(alone, together)), equals=0)
    record.figure("bits.clients_differ_from_each_other", alone[0] != alone[1], equals=True)
    sdk.killed(problems)
    record.figure("killed.equal_while_its_session_lives", sdk.run(small=cases[0])["small"] == alone[0], equals=True)
    record.figure("clients", sdk.count, at_least=7)
    record.figure("killed.sessions_that_have_not_ended", sdk.count - server.ended(sdk.count), equals=0)


def _count(value) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_count, value)) if isinstance(value, list) else 1


# ---- hostile clients


def _hostile(record, folder: Path) -> None:
    """Two owners of keys. What one tries with the names of the other gets nothing, before and after a new start."""

    def clients(server) -> list:
        return [requests.asking(server.port, "/api/v1/", **{"X-API-Key": f"tml-{name}"}) for name in ("alice", "bob")]

    (folder / "keys").write_text("alice tml-alice\nbob tml-bob\n")
    tried = reached = 0
    with _Server(record, folder, keys=True) as server:
        alice, bob = clients(server)
        known = requests.victim(alice) | requests.thief(bob)
        before = _rollouts(alice, known)
        while tried < TRIES // 2:
            outcomes = [hostile_clients.reached(bob, *one) for one in hostile_clients.knowing(known)]
            tried, reached = tried + len(outcomes), reached + sum(outcomes)
        record.figure("knowing.rollouts_equal_afterwards", _rollouts(alice, known) == before, equals=True)
        _values(record, alice, known["sampler"], server)
    with _Server(record, folder, keys=True) as server:
        alice, bob = clients(server)
        known |= requests.thief(bob)
        while tried < TRIES:
            outcomes = [hostile_clients.reached(bob, *one) for one in hostile_clients.knowing(known)]
            tried, reached = tried + len(outcomes), reached + sum(outcomes)
        record.figure("knowing.rollouts_equal_after_a_restart", _rollouts(alice, known) == before, equals=True)
    stolen = [str(one) for one in folder.rglob("*stolen*")]
    record.figure("knowing.tries", tried, at_least=TRIES)
    record.figure("knowing.tries_that_got_anything", reached, equals=0)
    record.figure("knowing.files_written", stolen, equals=[])


def _values(record, ask, sampler: str, server) -> None:
    wrong, values = [], hostile_clients.tinker_values()
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [3, 8, 11]}]}}
    with hostile_clients.Health(server.port, "/api/v1/healthz") as health:
        for changes in values:
            status, told = ask("POST", "asample", body | changes)
            if status != 400 and not (status == 200 and "error" not in requests.result(ask, told)):
                wrong.append(f"{changes}: {status}")
    record.figure("values.tried", len(values), at_least=60)
    record.figure("values.neither_refused_nor_sampled", wrong, equals=[])
    record.figure("values.ended_threads", server.said().count("Traceback"), equals=0)
    record.figure("values.slowest_health_s", health.most_s, at_most=HEALTH_S)


def _rollouts(ask, known: dict) -> dict:
    session = ask("POST", "create_session", {})[1]["session_id"]
    body = {"session_id": session, "model_path": known["paths"][1]}
    sampler = ask("POST", "create_sampling_session", body)[1]["sampling_session_id"]
    asked = {"prompt": {"chunks": [{"tokens": [3, 8, 11]}]}, "sampling_params": {"seed": 1, "max_tokens": 24}}
    told = ask("POST", "asample", asked | {"sampling_session_id": sampler, "num_samples": 4})[1]
    return requests.result(ask, told)


class _Server:
    """A server of the demo policy, in a process that ends with the block."""

    def __init__(self, record, folder: Path, keys: bool = False):
        door = f"--keys={folder / 'keys'}" if keys else f"--key={KEY}"
        command = [sys.executable, "-m", "jaxrl_post", "tinker", f"--model={POLICY}", "--port=0", door]
        command += [f"--folder={folder / 'saved'}", f"--idle={IDLE_S}", "--config.engine.max_length=128"]
        command += ["--config.engine.slots=32", "--config.engine.row_sizes=(32,64)"]
        env = {**os.environ, "PYTHONPATH": str(record.root), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        self._said = folder / "said.txt"
        with self._said.open("w") as out:
            self._process = subprocess.Popen(command, cwd=record.root, env=env, stdout=out, stderr=subprocess.STDOUT)
        self.port = 0

    def __enter__(self):
        while not self.port:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended before it served:\n{self._said.read_text()[-2000:]}")
            lines = [line for line in self._said.read_text().splitlines() if line.startswith("serving")]
            self.port = int(lines[0].rpartition(":")[2]) if lines else 0
            time.sleep(0.2)
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    def said(self) -> str:
        return self._said.read_text()

    def ended(self, count: int) -> int:
        """Waits until this many sessions have ended for want of a sign, and returns how many have."""
        deadline = time.monotonic() + 6 * IDLE_S
        while (found := self._said.read_text().count("gave no sign")) < count and time.monotonic() < deadline:
            time.sleep(1)
        return found


class _Sdk:
    """Runs parts of scripts/tinker_loops.py with the SDK's own Python."""

    def __init__(self, record, python: Path, folder: Path, port: int):
        self._root, self._python, self._folder, self.count = record.root, python, folder, 0
        self._plan = {"base_url": f"http://127.0.0.1:{port}", "base_model": "demo_policy"}
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._env = own | {"TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}

    def run(self, **parts) -> dict:
        """Runs parts in one process, and returns what they found."""
        return self.together([parts])[0]

    def together(self, every: list[dict]) -> list[dict]:
        """Runs a process for each of these parts, all at once."""
        started = [self._started(parts) for parts in every]
        for process, _ in started:
            if process.wait(LIMIT_S):
                raise RuntimeError(
                    f"scripts/tinker_loops.py exited {process.returncode}:\n{process.stdout.read()[-4000:]}"
                )
            process.stdout.close()
        return [json.loads(out.read_text()) for _, out in started]

    def killed(self, problems: list) -> None:
        """Kills a client in the middle of its training."""
        process, _ = self._started({"endless": {"problems": problems}})
        for line in process.stdout:
            if line.startswith("running"):
                break
        process.kill()
        process.wait(60)
        process.stdout.close()

    def _started(self, parts: dict):
        self.count += 1
        plan, out = (self._folder / f"{what}-{self.count}.json" for what in ("plan", "out"))
        plan.write_text(json.dumps(self._plan | {"parts": parts}))
        command = [str(self._python), "scripts/tinker_loops.py", str(plan), str(out)]
        how = dict(cwd=self._root, env=self._env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return subprocess.Popen(command, **how), out
