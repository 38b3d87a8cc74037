"""What makes a run of billions of weights small changes no gradient and no token.

Train step: scanned layers, split head, remat policies, and the kernels of packed rows, run without their devices. Also
the embedding's gradient as it adds up on GPUs. Each form is compared with the plain one, per leaf in relative 2-norm:
layers written out, the whole head, jnp attention, and XLA's own gradient.
The forms are compared inside the whole learner, on one device and on eight, in x64 and in float32. The TPU's kernel
knows no x64. A model with two kinds of windows and rotations is compared in the decoder alone. Sums in bfloat16 are
reported, and must be near.

Engine: a run that sleeps while the learner works, and one whose prompts go through the wide program, against runs
without: policy and rollouts, byte by byte. Rows that share one read of their pages on TPUs, in interpret mode, against
the same rows one by one. The GPU's kernel, interpreted, against the reference, on pages of every size.

Each planted fault must be far outside.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

MINUTES = 20.0
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-3

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

EIGHT = dict(sizes=(2, 2, 2))
SCANNED = dict(scan_layers="yes")
LEARNERS = {  # form -> what makes it, beside the plain learner
    "scanned": SCANNED,
    "scanned_full": SCANNED | dict(remat=True),
    "scanned_attention": SCANNED | dict(remat=True, remat_policy="attention"),
    "scanned_projections": SCANNED | dict(remat=True, remat_policy="projections"),
    "scanned_offload": SCANNED | dict(remat=True, remat_policy="offload"),
    "split_head": EIGHT | dict(split_head="yes"),
    "scanned_full_split_head": EIGHT | SCANNED | dict(remat=True, split_head="yes"),
}


ENGINE = {  # part: tests, and how many there are
    "sleep_and_wake": (("tests/test_main_sleep.py",), 7),
    "wide_prompts": (("tests/test_engine_prompt_program.py", "tests/test_kernels_prompt_attention.py"), 40),
    "one_read": (("tests/test_engine_one_read.py", "tests/test_kernels_attention_tpu.py"), 41),
    "pages_on_gpus": (("tests/test_kernels_attention_gpu.py",), 30),
}


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests")]
    import numpy as np

    for name, dtype, bound in (("x64", np.float64, EXACT), ("f32", np.float32, SINGLE)):
        _learners(record, name, dtype, bound)
        _layers(record, name, dtype, bound)
        _heads(record, name, dtype, bound)
        _kernels(record, name, dtype, bound)
        _embeddings(record, name, dtype, bound)
    _sums(record)
    _planted(record)
    for part, (tests, expected) in ENGINE.items():
        _tests(record, part, tests, expected)


def _learners(record, name: str, dtype, bound: float) -> None:
    """Compares whole learners: packed rows, every term of the loss, several micro-batches."""
    import gradient_arms as arms
    import made_groups

    groups = made_groups.groups()
    plain = arms.gradient(groups, dtype, scan_layers="no", split_head="no")
    for form, how in LEARNERS.items():
        found = arms.gradient(groups, dtype, **how)
        record.figure(f"{name}_learner_{form}", arms.worst(found, plain), at_most=bound)


def _layers(record, name: str, dtype, bound: float) -> None:
    """Compares the loop over layers that differ in window and rotation, and over equal ones."""
    import test_models_layer_loop as layers

    from jaxrl_post.models import layer_loop

    for kind, model in (("mixed", layers.MIXED), ("alike", layers.ALIKE)):
        plain = layers.gradient(model, dtype)
        for policy in layer_loop.POLICIES:
            found = layers.gradient(model, dtype, scan=True, remat=True, policy=policy)
            record.figure(f"{name}_{kind}_layers_{policy}", layers.worst(found, plain), at_most=bound)
        for form, placed in (("paired", False), ("placed", True)):
            found = layers.gradient(model, dtype, scan=True, paired=True, placed=placed, remat=True)
            record.figure(f"{name}_{kind}_layers_{form}", layers.worst(found, plain), at_most=bound)


def _heads(record, name: str, dtype, bound: float) -> None:
    """Compares log-probs, entropies and gradients of the split head with those of the whole one."""
    import made_groups
    import test_trainer_split_head as heads

    for kind, model in (("tied", heads.TIED), ("own", heads.OWN)):
        for sizes in ((2, 2, 2), (1, 8, 1), (1, 1, 8)):
            rows = heads.B if sizes[1] < 8 else 8
            split, whole = heads.both(model, sizes, dtype, rows=rows)
            far = max(made_groups.distances(split, whole).values())
            record.figure(f"{name}_{kind}_head_{'x'.join(map(str, sizes))}", far, at_most=bound)


def _kernels(record, name: str, dtype, bound: float) -> None:
    """Compares whole learners with the kernels of packed rows, on one device and on eight."""
    import functools

    import gradient_arms as arms
    import made_groups

    from jaxrl_post.kernels import flash_gpu, flash_tpu

    groups = made_groups.groups()
    plain = arms.gradient(groups, dtype, tokens=128)
    forms = {"flash": functools.partial(flash_gpu.attention, tiles=flash_gpu.square(16), interpret=True)}
    if name == "f32":
        forms["splash"] = functools.partial(flash_tpu.attention, interpret=True)
    for form, kernel in forms.items():
        for where, how in (("", {}), ("_eight_scanned", EIGHT | SCANNED | dict(remat=True))):
            found = arms.gradient(groups, dtype, tokens=128, attention=kernel, **how)
            record.figure(f"{name}_learner_{form}{where}", arms.worst(found, plain), at_most=bound)


def _embeddings(record, name: str, dtype, bound: float) -> None:
    """Compares whole learners whose embedding's gradient adds up as on GPUs and on TPUs, on one device and on eight."""
    import gradient_arms as arms
    import made_groups
    import pytest

    from jaxrl_post.trainer import embedding_gradient

    groups = made_groups.groups()
    plain = arms.gradient(groups, dtype)
    for sums in (embedding_gradient.in_pairs, embedding_gradient.in_pieces):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedding_gradient, "PIECE", 64)  # so that a small batch has several
            patch.setattr(
                embedding_gradient, "for_platform", lambda mesh, sums=sums: embedding_gradient.in_order(mesh, sums)
            )
            for where, how in (("", {}), ("_eight_scanned", EIGHT | SCANNED | dict(remat=True))):
                far = arms.worst(arms.gradient(groups, dtype, **how), plain)
                record.figure(f"{name}_learner_embedding_{sums.__name__}{where}", far, at_most=bound)


def _tests(record, part: str, tests: tuple[str, ...], expected: int) -> None:
    """Runs tests that compare bits of runs and engines, planted faults among them, both tiers."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=record.root, text=True, capture_output=True, timeout=1800)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    record.figure(f"engine_{part}_tests_passed", counts.get("passed", 0), at_least=expected)
    record.figure(f"engine_{part}_exit_code", done.returncode, equals=0)


def _sums(record) -> None:
    """Reports what gradient sums in bfloat16 cost in accuracy over three accumulates."""
    import gradient_arms as arms
    import made_groups

    from jaxrl_post.config import OptimizerConfig

    groups = made_groups.groups()
    exact = arms.gradient(groups, parts=3)
    rounded = arms.gradient(groups, parts=3, optimizer=OptimizerConfig(sums_dtype="bfloat16"))
    record.figure("f32_sums_in_bfloat16", arms.worst(rounded, exact), at_least=1e-5, at_most=2**-7)


def _planted(record) -> None:
    """Measures the distance that each planted fault makes, here and not by a test's exit code."""
    import made_groups
    import numpy as np
    import pytest
    import test_kernels_flash as flash
    import test_models_layer_loop as layers
    import test_trainer_split_head as heads

    plain = layers.gradient(layers.MIXED)
    for fault in layers.FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            far = layers.worst(layers.gradient(layers.MIXED, scan=True, remat=True), plain)
        record.figure(f"planted_{fault.__name__}", far, at_least=SEEN)
    for fault in heads.FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            split, whole = heads.both(heads.TIED, (2, 2, 2), np.float64)
        far = max(made_groups.distances(split, whole).values())
        record.figure(f"planted_{fault.__name__}", far if np.isfinite(far) else 1e9, at_least=SEEN)
    for fault in (*flash.FAULTS, *flash.TPU_FAULTS):
        form = flash.TPU if fault in flash.TPU_FAULTS else flash.GPU
        right = flash.results(flash.reference, flash.TOKENS[form], **flash.BOTH)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            far = flash.far(flash.results(form, flash.TOKENS[form], **flash.BOTH), right)
        record.figure(f"planted_{fault.__name__}", far, at_least=SEEN)
