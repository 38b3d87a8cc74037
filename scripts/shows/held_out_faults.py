"""Four faults that held-out checks had found, and what pages had not said: each is shown mended, on the code that had it.

1. A drafter changes no bit at any number of slots: every case of scripts/drafted_runs.py is a whole synchronous run, with each
   drafter and with none. No run may be refused. Tokens, log-probs and final policies must be equal. Planted: tiles of head rows
   that follow from the drafter, which must break an equality.
2. A stop string that the last allowed token completes ends a rollout as a stop id does.
3. Seconds in metrics.jsonl stand on rows of published optimizer steps, and rates are of the tokens of those seconds.
4. Gemma 3 with capped attention, which transformers ignores, is refused.
5. What the pages say of `keep` under page shortage, of page sizes and of k3 above its bound is measured. A Mistral without a
   window is written as one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MINUTES = 25.0
LIMIT_S = 7200
KINDS = ("tokens", "logprobs", "policy")
QUIET = ("--config.eval.prompts=8", "--config.eval.every=0", "--config.checkpoint.every=0")

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests"), str(record.root / "scripts")]
    _drafters(record)
    _stop_strings(record)
    _timings(record)
    _families(record)
    _keep_under_page_shortage(record)
    _words(record)


# ---- 1. Drafts at every number of slots


def _drafters(record) -> None:
    import drafted_runs as runs

    found = record.cached("runs", lambda: _runs(record))
    cases = {case.name: {d: found["cases"][f"{case.name} {d}"] for d in runs.DRAFTERS} for case in runs.CASES}
    refused = [
        f"{name} {d}: {got['refused']}" for name, by in cases.items() for d, got in by.items() if "refused" in got
    ]
    record.figure("drafters.cases", len(cases), equals=42)
    record.figure("drafters.runs", sum(map(len, cases.values())), equals=126)
    record.figure("drafters.refused", refused, equals=[])
    record.figure("drafters.tokens", sum(by["off"].get("num_tokens", 0) for by in cases.values()), at_least=10000)
    for drafter in runs.DRAFTERS[1:]:
        for count, least in (("drafted", 5000), ("accepted", 500)):
            total = sum(by[drafter].get(count, 0) for by in cases.values())
            record.figure(f"drafters.{drafter}.{count}", int(total), at_least=least)
        for kind in KINDS:
            record.figure(f"drafters.{drafter}.{kind}_differ", _differing(cases, drafter, kind), equals=[])
    asked = list(found["asked"].values())
    for kind in KINDS:
        digests = {got.get(kind, "refused") for got in asked} | {cases[runs.ONE.name]["off"].get(kind)}
        record.figure(f"head_rows_asked_for.{kind}_differ", len(digests) - 1, equals=0)
    planted = found["planted"]
    differ = [kind for kind in KINDS if planted["off"].get(kind) != planted["ours"].get(kind)]
    record.figure("planted_head_size.what_differs", differ)
    record.figure("planted_head_size.caught", "logprobs" in differ and "policy" in differ, equals=True)


def _differing(cases: dict, drafter: str, kind: str) -> list[str]:
    return [
        name for name, by in cases.items() if by["off"].get(kind) is None or by["off"][kind] != by[drafter].get(kind)
    ]


def _runs(record) -> dict:
    """Digests of all runs, in as many processes as there are cores."""
    cores = os.cpu_count() or 1
    parts = [["planted"], ["asked"], *([str(part), str(cores)] for part in range(cores))]
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(cores) as pool:
            done = [
                pool.submit(record.run, "scripts/drafted_runs.py", folder, *part, timeout_s=LIMIT_S) for part in parts
            ]
            for one in done:
                one.result()
        read = {part[0]: json.loads((Path(folder) / f"{part[0]}.json").read_text()) for part in parts}
    cases = {name: got for part in parts[2:] for name, got in read[part[0]].items()}
    return {"cases": cases, "planted": read["planted"], "asked": read["asked"]}


# ---- 2. Stop strings


def _stop_strings(record) -> None:
    import test_engine_host_sequence as lab

    for steps in (1, 8):
        for name, text, want in (("completed", "abgh", "stop"), ("not_completed", "abga", "length")):
            finish = lab.stopped_by_h(4, steps, text).finish.value
            record.figure(f"stop_string.{name}_at_the_last_token.dispatch_of_{steps}", finish, equals=want)


# ---- 3. Seconds


def _timings(record) -> None:
    changed = {
        "mini_batches": (
            "demo",
            "--config.steps=12",
            "--config.scheduler.mini_batches=4",
            "--config.scheduler.prompts=32",
        ),
        "pipeline": ("demo_pipeline", "--config.steps=9", "--config.scheduler.prompts=16"),
    }
    from jaxrl_post.telemetry import metrics

    with tempfile.TemporaryDirectory() as folder:
        for name, (config, *flags) in changed.items():
            place = Path(folder) / name
            command = ("-m", "jaxrl_post.main", f"--config=configs/{config}.py", *QUIET, *flags, f"--run-dir={place}")
            seconds = record.run(*command, timeout_s=900)
            rows = [row for row in metrics.read(place / "metrics.jsonl") if "training/global_step" in row]
            published = _published(place / "scheduler_log.jsonl")
            _rows(record, name, rows, published, seconds)


def _published(log: Path) -> list[bool]:
    """Of every optimizer step, whether it is published, by the log of decisions."""
    parts = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "take"]
    return [part["publish"] for part in parts if part["commit"]]


def _rows(record, name: str, rows: list[dict], published: list[bool], seconds: float) -> None:
    timed = ["timing_s/step" in row for row in rows]
    record.figure(f"seconds.{name}.steps", len(rows), at_least=9)
    record.figure(f"seconds.{name}.steps_without_a_publish", published.count(False), at_least=1)
    record.figure(f"seconds.{name}.stand_where_a_step_is_published", timed == published, equals=True)
    spent = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    record.figure(f"seconds.{name}.of_rows", [round(one, 3) for one in spent])
    record.figure(f"seconds.{name}.share_of_the_command", round(sum(spent) / seconds, 3), at_most=1.0)
    wrong, trained, generated, fastest = 0, 0.0, 0.0, 0.0
    for row in rows:
        trained += row["rollout/num_tokens"]
        generated += row.get("rows/decode", 0.0) + row.get("spec/num_accepted", 0.0)
        if "timing_s/step" not in row:
            continue
        wrong += abs(row["perf/throughput"] * row["timing_s/step"] - trained) > 1e-6 * trained
        wrong += abs(row.get("perf/generated_tokens_per_s", 0.0) * row["timing_s/gen"] - generated) > 1e-6 * generated
        fastest, trained, generated = max(fastest, row["perf/throughput"]), 0.0, 0.0
    record.figure(f"seconds.{name}.rates_of_other_tokens", wrong, equals=0)
    record.figure(f"seconds.{name}.fastest_tokens_per_s", round(fastest), at_most=100_000)


# ---- 4. Families


def _families(record) -> None:
    from jaxrl_post.models import families

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"

        def read(name: str, **changed):
            given = json.loads((record.root / "tests" / "goldens" / name / "config.json").read_text())
            file.write_text(json.dumps(given | changed))
            return families.read(file)

        try:
            said = f"accepted: {read('gemma3', attn_logit_softcapping=50.0).attn_soft_cap}"
        except ValueError as error:
            said = str(error).replace(str(file), "config.json")
        record.figure("gemma3_with_capped_attention", said)
        record.figure("gemma3_with_capped_attention.refused", "the nearest valid value is null" in said, equals=True)
        plain = read("mistral", sliding_window=None)
        about = families.write(plain)
        record.figure("mistral_without_a_window.written_as", about["architectures"], equals=["MistralForCausalLM"])
        file.write_text(json.dumps(about))
        record.figure("mistral_without_a_window.comes_back", families.read(file) == plain, equals=True)


# ---- 5. Sentences


def _keep_under_page_shortage(record) -> None:
    """A swap in mid generation under `keep`, with pages for all and for few: who is off the law of kept keys and values."""
    import engine_lab as lab
    import numpy as np

    asked = lab.requests(24, longest_prompt=20, longest=48, seed=5)
    old, new = lab.weights(0), lab.weights(1)
    for name, pages in (("enough", 96), ("few", 13)):
        engine = lab.engine(old, pages=pages)
        out = lab.swap_in_mid_generation(engine, asked, _placed(new), steps=2, mode="keep")
        counts = engine.metrics()
        by_version = {0: old, 1: new}
        off = [r for r in asked if lab.kept_across_swaps(out[r.rollout_id], r, by_version)]
        mixed = sum(np.unique(rollout.versions).size == 2 for rollout in out.values())
        counted = int(counts.get("sched/recomputed_older_versions", 0))
        record.figure(f"keep.{name}_pages.rollouts_of_two_versions", mixed, at_least=3)
        record.figure(f"keep.{name}_pages.preemptions", int(counts.get("sched/preemptions", 0)))
        least = {"equals": 0} if name == "enough" else {"at_least": 1}
        record.figure(f"keep.{name}_pages.recomputed_older_versions", counted, **least)
        some = {} if name == "enough" else {"at_least": 1}
        record.figure(f"keep.{name}_pages.off_the_law_of_keep", len(off), at_most=counted, **some)


def _placed(params):
    import engine_lab as lab

    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    return meshes.put(params, meshes.param_shardings(meshes.make_mesh(), decoder.axes(lab.TINY), "engine"))


def _words(record) -> None:
    import engine_lab as lab
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_post.algorithms.kl_estimators import k3

    gap = jnp.array([[2.0, 2.6, 3.0]])  # log ref - log pi; k3 is 4.4, 9.9 and 16.1
    value = k3(jnp.zeros_like(gap), gap)
    slope = jax.grad(lambda logprobs: k3(logprobs, gap).sum())(jnp.zeros_like(gap))
    record.figure("k3.values", [round(x, 3) for x in np.asarray(value)[0].tolist()])
    record.figure("k3.gradient_is_zero", (np.asarray(slope)[0] == 0).tolist(), equals=[False, False, True])
    asked = lab.requests(24, seed=6, temperatures=(1.0,))
    small, same, large = (lab.run(lab.engine(page_size=size, pages=96 * 16 // size), asked) for size in (8, 16, 16))
    record.figure("page_size.equal_sizes_give_equal_bits", lab.same_bits(same, large), equals=True)
    apart = [
        float(np.abs(one.logprobs - other.logprobs).max())
        for one, other in ((small[name], large[name]) for name in small)
        if len(one) == len(other) and (one.tokens == other.tokens).all()
    ]
    record.figure("page_size.largest_logprob_difference", max(apart), at_most=1e-4)
    record.figure("page_size.rollouts_of_other_tokens", len(small) - len(apart))
