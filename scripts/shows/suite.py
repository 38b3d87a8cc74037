"""Tests that CI leaves to shows, and the tests of single promises: all of them pass.

Arms (`--arms=shown,scheduler`; all without it):

- shown: every test that is marked `shown`. `make test-all` leaves it out, because it repeats on more what another one checks.
- the others run the test files of a promise, those marked `shown` included. Planted faults are among them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

MINUTES = 50.0
LIMIT_S = 7200
ENDS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
SHOWN = 150  # tests that are left to a show, at least
PROMISES = {  # arm -> files of tests, and how many tests pass at least
    # Scanned layers, the split head, kernels, sleep, wide prompts and shared reads change no gradient and no token.
    "exact-scale": (
        "models_layer_loop trainer_split_head trainer_sums kernels_flash trainer_embedding_gradient main_sleep "
        "engine_prompt_program kernels_prompt_attention engine_one_read kernels_attention_tpu kernels_attention_gpu",
        150,
    ),
    # Gradients of every way to train are those of plain code.
    "training-parity": (
        "trainer_terms trainer_critic trainer_teacher trainer_preferences trainer_reward_model trainer_lora "
        "algorithms_losses algorithms_credit data_conversations data_supervised",
        100,
    ),
    # Every group ends exactly once, decisions repeat, and a run goes on from any point.
    "scheduler": ("scheduler_properties scheduler_pipeline", 20),
    # Drafts change no token: every drafter, right and wrong scripts, clones, swaps, and whole runs.
    "drafts": ("engine_speculation main_speculation", 40),
    # Turns are tokenised as the whole text, and nothing that makes the engine fast changes one.
    "turns": ("data_turns engine_host_turns", 20),
    # Damage to any file of a checkpoint is found and named, and a whole step is used.
    "damage": ("checkpoint_damage checkpoint_store", 20),
    # Launches render, validate, lint and call as they should; misfits are one sentence each.
    "launch": ("launch_jobs launch_job_plan", 60),
}


def show(record) -> None:
    arms = record.options.get("arms", ",".join(("shown", *PROMISES))).split(",")
    for arm in arms:
        if arm == "shown":
            _tests(
                record,
                arm,
                ["-m", "shown", "-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "tests"],
                SHOWN,
            )
        else:
            names, least = PROMISES[arm]
            _tests(record, arm, [f"tests/test_{name}.py" for name in names.split()], least)


def _tests(record, arm: str, arguments: Sequence[str], least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=1800", *arguments],
        cwd=record.root,
        env=os.environ | {"JAXRL_DATA": str(record.data()), "JAXRL_REQUIRE_DATA": "1"},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    counts = {word.rstrip("s"): int(count) for count, word in ENDS.findall(done.stdout)}
    record.figure(f"{arm}.passed", counts.get("passed", 0), at_least=least)
    record.figure(f"{arm}.failed", counts.get("failed", 0) + counts.get("error", 0), equals=0)
    record.figure(f"{arm}.skipped", counts.get("skipped", 0), equals=0)
    record.figure(f"{arm}.exit_code", done.returncode, equals=0)
