"""Packed rows over several devices: one device's gradient, bit-equal resumed runs, and a run of rollouts of 16,384 tokens.

1. equal: gradients per leaf against one device, in float64 and float32, over 2, 4 and 8 devices. Rows hold several segments,
   which end inside parts. Models have windows, sinks, experts and recurrent layers, and texts share prompts.
2. kernels: the same by the kernels of both platforms, run without their devices.
3. runs: configs/demo/context.py is killed with kill -9 and resumed: it ends as the undisturbed run, bit for bit.
4. long: a run of rollouts of 16,384 tokens over four devices, beside one in which each device has whole rows.
5. planted: parts that are put together in the wrong order, and keys of one device alone, are far outside.

`--arms=NAME,NAME` runs some of these.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import gradient_arms as arms
import jax
import numpy as np
import pytest
import shared_arms
import test_trainer_context as tests
from killed import Runs

from jaxrl_post.models import hf
from jaxrl_post.parallel import row_pieces
from jaxrl_post.runs import rollout_log

MINUTES = 25.0
PLATFORM = "cpu"
BOUNDS = {"x64": (np.float64, 1e-12), "f32": (np.float32, 5e-6)}
SEEN = 1e-3
STEPS, SEEDS, STARTING = 6, tuple(range(6)), 1
LONG_S = 1800.0  # of a run of long rollouts, at most
DEMO = [
    "--config=configs/demo/context.py",
    "--config.checkpoint.every=1",
    "--config.eval.every=0",
    "--config.eval.prompts=8",
    "--config.scheduler.prompts=16",
]
LENGTH = 16_384
LONG = [
    "--config=configs/demo/context.py",
    "--config.steps=1",
    "--config.checkpoint.every=0",
    "--config.eval.prompts=0",
    "--config.eval.every=0",
    f"--config.sampling.max_tokens={LENGTH}",
    "--config.sampling.top_k=4",
    "--config.engine.max_length=16512",
    "--config.engine.slots=2",
    "--config.engine.row_sizes=(2,)",
    "--config.mesh.engine=1",
    "--config.engine.pages=0",
    "--config.engine.steps_per_dispatch=64",
    "--config.engine.refill_slots=1",
    "--config.scheduler.prompts=1",
    "--config.scheduler.group_size=2",
    "--config.batch.tokens=16512",
    "--config.optimizer.warmup_steps=0",
]
REWARD = '''def score(data_source, solution_str, ground_truth, extra_info):
    """The share of even digits."""
    return sum(letter in "02468" for letter in solution_str) / max(len(solution_str), 1)
'''

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def show(record) -> None:
    every = {"equal": _equal, "kernels": _kernels, "runs": _runs, "long": _long, "planted": _planted}
    for name in record.options.get("arms", ",".join(every)).split(","):
        every[name](record)


def _equal(record) -> None:
    models = shared_arms.MODELS | {"recurrent": tests.RECURRENT}
    for short, (dtype, bound) in BOUNDS.items():
        plain = arms.plain_gradient(tests.GROUPS, dtype, **tests.MODE)
        for way, how in tests.WAYS.items():
            found = arms.gradient(tests.GROUPS, dtype, **tests.MODE, **(tests.LONG | how))
            record.figure(f"{short}.{way}", arms.worst(found, plain), at_most=bound)
        for name, model in models.items():
            one = arms.gradient(tests.GROUPS, dtype, **tests.MODE, model=model)
            for way in ("two", "four", "two_of_eight"):
                for kind, shared in {"flat": {}, "shared": shared_arms.SHARED}.items():
                    if shared and name == "recurrent":
                        continue
                    how = tests.LONG | tests.WAYS[way] | shared
                    found = arms.gradient(tests.GROUPS, dtype, **tests.MODE, **how, model=model)
                    record.figure(f"{short}.{way}.{name}.{kind}", arms.worst(found, one), at_most=bound)


def _kernels(record) -> None:
    for name, form, short in (("gpu", tests.GPU, "x64"), ("tpu", tests.TPU, "f32")):
        dtype, bound = BOUNDS[short]
        plain = arms.plain_gradient(tests.GROUPS, dtype, **tests.MODE)
        for way in ("two", "four"):
            for kind, shared in {"flat": {}, "shared": shared_arms.SHARED}.items():
                how = tests.LONG | tests.WAYS[way] | shared
                found = arms.gradient(tests.GROUPS, dtype, **tests.MODE, **how, attention=form)
                record.figure(f"{short}.kernel_of_{name}.{way}.{kind}", arms.worst(found, plain), at_most=bound)


def _runs(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Runs(record, Path(folder), [*DEMO, f"--config.steps={STEPS}"], STEPS).killed_at(SEEDS, STARTING)


def _long(record) -> None:
    """The policy never ends a rollout: its end token is one that the four likeliest never are."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        policy = shutil.copytree(record.root / "configs" / "demo_policy", here / "policy")
        for name, changes in {
            "config.json": {"max_position_embeddings": 16512, "eos_token_id": 14},
            "generation_config.json": {"eos_token_id": 14},
            "tokenizer_config.json": {"eos_token": "<unk>"},
        }.items():
            file = policy / name
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        (here / "reward.py").write_text(REWARD)
        more = [f"--config.model.path={policy}", f"--config.reward.functions=('{here}/reward.py:score',)"]
        found = {}
        for name, context in (("shared", 4), ("whole", 1)):
            sizes = [f"--config.mesh.context={context}", f"--config.batch.rows={4 // context}"]
            run = Runs(record, here, [*LONG, *more, *sizes], 1)
            _, seconds = run.finish(name, LONG_S)
            record.figure(f"long.{name}.seconds", round(seconds, 1))
            rollouts = [
                rollout
                for file in sorted((here / name / "rollouts").glob("step_*.npz"))
                for group in rollout_log.read(file)
                for rollout in group.rollouts
            ]
            record.figure(f"long.{name}.rollouts_of_{LENGTH}", sum(len(one) == LENGTH for one in rollouts), equals=2)
            row = json.loads((here / name / "metrics.jsonl").read_text().splitlines()[0])
            found[name] = {str(one.id): one.tokens for one in rollouts}, row, hf.load(here / name / "policy")[1]
        (tokens, row, weights), (others, other, theirs) = found["shared"], found["whole"]
        same = tokens.keys() == others.keys() and all(np.array_equal(tokens[name], others[name]) for name in tokens)
        record.figure("long.same_tokens", same, equals=True)
        record.figure("long.grad_norm", row["actor/grad_norm"], at_least=1e-9)
        gap = abs(row["actor/grad_norm"] / other["actor/grad_norm"] - 1)
        record.figure("long.grad_norm_difference", gap, at_most=1e-4)
        record.figure("long.weights", arms.worst(weights, theirs), at_most=5e-6)


def _planted(record) -> None:
    plain = arms.plain_gradient(tests.GROUPS, np.float64, **tests.MODE)

    def in_order_of_devices(patch):
        """Every device has a stretch from the front alone, and texts are told that it has both ends."""
        patch.setattr(
            row_pieces.RowPieces, "joined", lambda self, x: x.reshape(-1, self.context * x.shape[1], *x.shape[2:])
        )

    def keys_of_one_device(patch):
        patch.setattr(
            row_pieces.RowPieces, "gathered", lambda self, x: jax.numpy.concatenate([x] * self.context, axis=1)
        )

    for fault in (in_order_of_devices, keys_of_one_device):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            found = arms.gradient(tests.GROUPS, np.float64, **tests.MODE, **(tests.LONG | tests.WAYS["four"]))
        record.figure(f"planted_{fault.__name__}", arms.worst(found, plain), at_least=SEEN)
