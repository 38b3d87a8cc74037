"""SFT, DPO and RL are chained by commands, and each improves its own held-out metric; distillation reaches its teacher.

1. sft: supervised training from random weights. Metric: nats per token of solutions to held-out problems.
2. dpo: preferences, from the policy that 1. wrote. Metric: the share of held-out pairs whose chosen completion has the
   higher implicit reward. Before, every reward is 0; a metric that knows nothing is right for half of them.
3. rl: rewards, from the policy that 2. wrote. Metric: the mean reward of rollouts on held-out prompts.
4. planted: the step 2. with the labels of its training pairs swapped must fail its bound.
5. distilled: distillation from the trained demo policy, into random weights and into the policy before RL
   (scripts/prefer_and_distil/distillation.py).

Every step is a command. The policy folder of one is the model of the next. Held-out problems are those of one split, which
no step trains on. Intervals are of 95 %: of differences the bootstrap over problems, of shares Wilson's. `--arms=chained` runs
1. to 4., `--arms=distilled` runs 5.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import trained
from prefer_and_distil import distillation
from scipy import stats

from jaxrl_post.data import prompts, tasks
from jaxrl_post.runs import rollout_log
from jaxrl_post.telemetry import estimates

MINUTES = 10.0

LIMIT_S = 3600.0  # of one command, on a busy machine
SUMS = {"usual": 3, "longest": 4}  # of three terms, seldom four: a policy learns to add them within minutes
TRAINED = tuple(f"--config.data.task.{name}={value}" for name, value in {**SUMS, "tail": 0.05}.items())
HELD_OUT = tuple(f"--config.eval.task.{name}={value}" for name, value in SUMS.items())
STEPS = {
    "sft": ("demo/sft", "steps=800", "eval.every=0", "data.size=4096", "data.task.careful=0.5"),
    "dpo": ("demo/dpo", "steps=12", "eval.every=0"),
    "rl": ("demo", "steps=50", "eval.every=0", "data.size=1536"),
}


def show(record) -> None:
    arms = {"chained": _chained, "distilled": distillation.show}
    for name in record.options.get("arms", ",".join(arms)).split(","):
        arms[name](record)


def _chained(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model: Path | None = None
        for name in STEPS:
            _run(record, place / name, *_command(name, model))
            model = place / name / "policy"
        _supervised(record, place / "sft")
        _preferred(record, "dpo", place / "dpo", at_least=0.5)
        _rewarded(record, "dpo", place / "dpo")
        _rewarded(record, "rl", place / "rl", at_least=0.01)
        _apart(record, place)
        _planted(record, place)


def _command(name: str, model: Path | None) -> list[str]:
    config, *more = STEPS[name]
    begun = [f"--config.model.path={model}"] if model else []
    return [f"--config=configs/{config}.py", *begun, *(f"--config.{one}" for one in more), *TRAINED, *HELD_OUT]


def _run(record, place: Path, *arguments: str) -> None:
    seconds = record.run("-m", "jaxrl_post.main", *arguments, f"--run-dir={place}", timeout_s=LIMIT_S)
    record.figure(f"{place.name}.seconds", round(seconds, 1))


# ---- held-out metrics, read from the logs of the runs


def _completions(run: Path) -> list[dict]:
    """Returns the summed log-probs and the tokens of held-out completions, by prompt id: before and after the run."""
    files = sorted((run / "completions").glob("step_*.npz"))
    return [
        {
            group.prompt.id: [
                (float(r.logprobs[r.sampled].sum(dtype=float)), int(r.sampled.sum())) for r in group.rollouts
            ]
            for group in rollout_log.read(file)
        }
        for file in (files[0], files[-1])
    ]


def _supervised(record, run: Path) -> None:
    before, after = _completions(run)
    told = trained.summary(run)["completions"]
    for when, found in (("before", before), ("after", after)):
        loss = -sum(one[0][0] for one in found.values()) / sum(one[0][1] for one in found.values())
        record.figure(f"sft.loss.{when}", loss)
        record.figure(f"sft.loss.{when}.off_the_run_s_own", abs(loss - told[when]["loss"]), at_most=1e-5)
    falls = [(after[id][0][0] - before[id][0][0]) / before[id][0][1] for id in before]
    _interval(record, "sft.fall_of_loss", falls, at_least=0.5)


def _preferred(record, name: str, run: Path, *, at_least: float | None = None) -> float:
    """Writes how many held-out pairs are ranked as they are labelled. Returns the lower end of the share's interval."""
    before, after = _completions(run)
    config = json.loads((run / "config.json").read_text())
    gains = {id: [a[0] - b[0] for a, b in zip(after[id], before[id], strict=True)] for id in before}
    margins = [config["algorithm"]["dpo_beta"] * (chosen - rejected) for chosen, rejected in gains.values()]
    right = sum(margin > 0 for margin in margins)
    told = trained.summary(run)["completions"]
    found = stats.binomtest(right, len(margins)).proportion_ci(method="wilson")
    record.figure(f"{name}.pairs", len(margins), at_least=256)
    record.figure(f"{name}.accuracy.before", told["before"]["rewards/accuracies"], equals=0.0)
    record.figure(f"{name}.accuracy.after", right / len(margins))
    off = abs(right / len(margins) - told["after"]["rewards/accuracies"])
    record.figure(f"{name}.accuracy.after.off_the_run_s_own", off, at_most=1e-9)
    record.figure(f"{name}.accuracy.after.low", found.low, **({} if at_least is None else {"at_least": at_least}))
    record.figure(f"{name}.accuracy.after.high", found.high)
    record.figure(f"{name}.margin.after", sum(margins) / len(margins))
    likelier = [{id: float(one[0][0] > one[1][0]) for id, one in found.items()} for found in (before, after)]
    record.figure(f"{name}.chosen_is_likelier.before", sum(likelier[0].values()) / len(margins))
    gained = [likelier[1][id] - likelier[0][id] for id in before]
    _interval(record, f"{name}.chosen_is_likelier.gain", gained, **({} if at_least is None else {"at_least": 0.01}))
    return found.low


def _rewarded(record, name: str, run: Path, *, at_least: float | None = None) -> None:
    """Writes the reward on held-out prompts before and after, and the interval of its gain."""
    files = sorted((run / "evaluations").glob("step_*.npz"))
    logs = (rollout_log.scores(file) for file in (files[0], files[-1]))
    # The first half of the groups are sampled rollouts, the other half greedy ones.
    before, after = ({one.prompt.id: one for one in groups[: len(groups) // 2]} for groups in logs)
    means = [{id: float(one.accuracies.mean()) for id, one in found.items()} for found in (before, after)]
    for when, found in zip(("before", "after"), means, strict=True):
        record.figure(f"{name}.reward.{when}", sum(found.values()) / len(found))
    _interval(record, f"{name}.reward.gain", [means[1][id] - means[0][id] for id in means[0]], at_least=at_least)


def _interval(record, key: str, values: list[float], *, at_least: float | None = None) -> None:
    low, high = estimates.mean_interval(values)
    record.figure(key, sum(values) / len(values))
    record.figure(f"{key}.low", low, **({} if at_least is None else {"at_least": at_least}))
    record.figure(f"{key}.high", high)


def _apart(record, place: Path) -> None:
    """No held-out problem of any step is one that any step trains on."""

    def ids(*folders: str) -> set[str]:
        files = [file for name in STEPS for folder in folders for file in (place / name / folder).glob("step_*.npz")]
        return {group.prompt.id for file in files for group in rollout_log.scores(file)}

    held_out = ids("completions", "evaluations")
    record.figure("held_out_problems", len(held_out), at_least=256)
    record.figure("held_out_problems_that_a_step_trained_on", len(held_out & ids("rollouts")), equals=0)


# ---- the planted fault


def _planted(record, place: Path) -> None:
    """Trains on pairs whose labels are swapped. The held-out pairs keep theirs."""
    from jaxrl_post import config

    given = config.resolve(config.load(str(record.root / "configs" / "demo" / "dpo.py"))).data
    rows = prompts.rows(
        given.train, seed=0, split="sft", size=given.size, arguments={**given.task, **SUMS, "tail": 0.05}
    )
    file = place / "swapped.jsonl"
    lines = []
    for row in rows:
        better, worse = tasks.TASKS["sums"].prefer(row["extra"])
        told = {"data_source": row["source"], "reward_model": {"ground_truth": row["answer"]}, "prompt": row["prompt"]}
        lines.append(json.dumps(told | {"chosen": worse, "rejected": better}))
    file.write_text("\n".join(lines) + "\n")
    own = [one for one in _command("dpo", place / "sft" / "policy") if one not in TRAINED]
    swapped = ["--config.data=default", f"--config.data.train={file}", "--config.eval.data=task:sums"]
    _run(record, place / "swapped", *own, *swapped)
    low = _preferred(record, "swapped", place / "swapped")
    record.figure("planted.swapped_labels_miss_the_bound", low < 0.5, equals=True)
