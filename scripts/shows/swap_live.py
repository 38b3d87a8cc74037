"""A swap in mid-generation: keep, recompute and verify each do what they say, and cost no more than a copy.

Swaps on a tiny random model, half-way through 48 rollouts.

- keep: every rollout with tokens of both versions equals a cached one-sequence numpy reference that switches weights at
  the same token.
- recompute: the tokens after the swap equal a full forward pass of the new weights over the whole text.
- verify: every rollout is, bit for bit, what an engine with the new weights gives, and agrees with the independent
  sampler.

Then scripts/bench.py swap runs, with its bounds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

MINUTES = 2.0

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests")]
    _modes(record)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "swap.json"
        record.run("scripts/bench.py", "swap", "--json", file, timeout_s=600)
        bench = json.loads(file.read_text())
    for name, value in bench["figures"].items():
        bounds = {kind: bound for kind, bound in bench["bounds"].get(name, {}).items() if kind != "ok"}
        record.figure(f"bench_{name}", value, **bounds)


def _modes(record) -> None:
    import engine_lab as lab

    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    mesh, asked = meshes.make_mesh(), lab.requests(48, samples=4, seed=11, longest=48)
    shardings = meshes.param_shardings(mesh, decoder.axes(lab.TINY), "engine")
    old = lab.weights(0)
    near = {**old, "final_norm": old["final_norm"] * 1.01}  # so that verify keeps something

    def run(mode, new):
        return lab.swap_in_mid_generation(lab.engine(), asked, meshes.put(new, shardings), steps=4, mode=mode)

    def both_versions(out):
        return [r for r in asked if set(out[r.rollout_id].versions.tolist()) == {0, 1}]

    kept, new = run("keep", lab.weights(1)), lab.weights(1)
    mixed = both_versions(kept)
    record.figure("keep_answers_of_both_versions", len(mixed), at_least=8)
    objections = [lab.kept_across_swaps(kept[r.rollout_id], r, {0: old, 1: new}) for r in mixed]
    record.figure("keep_objections_of_the_cached_reference", sum(map(bool, objections)), equals=0)

    redone = run("recompute", new)
    mixed = both_versions(redone)
    record.figure("recompute_answers_of_both_versions", len(mixed), at_least=8)
    objections = [lab.recomputed_after_swap(redone[r.rollout_id], r, new, 1) for r in mixed]
    record.figure("recompute_objections_of_the_full_forward", sum(map(bool, objections)), equals=0)

    verified, want = run("verify", near), lab.run(lab.engine(near), asked)
    record.figure("verify_bits_equal_new_weights", lab.same_bits(verified, want), equals=True)
    record.figure(
        "verify_objections_of_the_independent_sampler", len(lab.against_sampler(verified, asked, near)), equals=0
    )
    drafted = sum(int(r.drafted.sum()) for r in verified.values())
    record.figure("verify_tokens_taken_over", drafted, at_least=20)
    record.figure("verify_tokens_in_all", sum(len(r) for r in verified.values()))
