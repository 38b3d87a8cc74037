"""The end of a run: the policy, the summary, and what the screen shows last. Every process takes part in gathering the policy."""

from __future__ import annotations

import time

import jax

from jaxrl_post.engine.row_engine import RowEngine
from jaxrl_post.launch import resume
from jaxrl_post.launch.assemble import Run
from jaxrl_post.launch.parts import adapter, completions, second_models
from jaxrl_post.models import hf, lora
from jaxrl_post.parallel.processes import say
from jaxrl_post.runs import metric_rows
from jaxrl_post.runs import run_folder as folder
from jaxrl_post.runs.checkpoint import log_marks
from jaxrl_post.runs.journal import forget_aside
from jaxrl_post.telemetry import mode_report, report
from jaxrl_post.telemetry.observer import Observer
from jaxrl_post.telemetry.page import document


def finish(run: Run, observe: Observer) -> None:
    """Writes the policy and the summary, and prints them."""
    tokenizer = run.start.tokenizer
    hf.save(
        run.folder / second_models.folder_name(run.start.model),
        run.start.model,
        lora.exported(run.learner.params),
        dtype=run.start.dtype,
        tokenizer_files=run.start.files,
        eos_ids=tokenizer.eos_ids,
        bos_id=tokenizer.bos_id,
        others=run.start.others,
    )
    adapter.export(run.folder / "adapter", run.config, run.start.model, run.learner.params)
    if jax.process_index() != 0:
        log_marks.forget(run.mine)
        return
    rows = metric_rows.read(run.mine / "metrics.jsonl")
    summary = _summary(run, observe, rows)
    folder.write_json(run.folder / "summary.json", summary)
    folder.write_json(run.folder / "bias.json", run.meter.report())
    document.write([run.folder], run.folder / document.NAME)
    forget_aside(run.mine)
    log_marks.forget(run.mine)
    tokens = "trained" if run.config.engine.name != "rows" else "sampled"
    if run.config.logger.quiet:
        ends = report.headline(summary | {"swap": None}, run.config.eval.samples, tokens)
        say("\n".join([*ends[1:], f"run folder: {run.folder}"]))
        return
    ends = [*report.headline(summary, run.config.eval.samples, tokens), *mode_report.lines(summary["mode"])]
    say("\n".join([*held_out_rollouts(run), *ends, *folder.contents(run.folder)]))


def _summary(run: Run, observe: Observer, rows: list[dict]) -> dict:
    """Returns summary.json. `tokens` and `seconds` are those of the last start, so that one divides by the other."""
    figures = [found.figures() for found in run.evaluations] or [None]
    cost = run.engine.cost if isinstance(run.engine, RowEngine) else None
    return {
        "name": run.config.name,
        "seed": run.config.seed,
        "eval": {"before": figures[0], "after": figures[-1]},
        "completions": completions.before_and_after(rows),
        "steps": run.learner.step,
        "resumed_at": observe.begun.step,
        "tokens": observe.tokens - observe.begun.tokens,
        "all_tokens": observe.tokens,
        "versions": resume.versions(),
        "graders": run.about.get("graders", {}),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "sandbox": run.rewards.confined,
        "swap": run.swap,
        "overlong": dict(run.start.overlong),
        "seconds": round(time.monotonic() - run.began, 3),
        "device_time": report.device_time(rows),
        "mode": mode_report.figures(run.config, rows, run.about.get("auto"), cost),
    } | ({"parent": run.parent.told()} if run.parent else {})


def held_out_rollouts(run: Run) -> list[str]:
    """Returns lines that show held-out prompts with their greedy rollouts before and after training, cut where long."""
    lines = []
    first, last = (run.evaluations or [None])[0], (run.evaluations or [None])[-1]
    for index in range(min(run.config.eval.show, len(run.start.held_out))):
        prompt = run.start.held_out[index]
        text = report.line(run.start.tokenizer.decode(prompt.tokens))
        lines.append(f"\nprompt  {text}   answer {report.line(str(prompt.answer))}")
        for word, found in (("before", first), ("after", last)):
            group = found.greedy[index]
            mark = f"{group.accuracies[0]:g}" if group.scored[0] else "no score"
            text = report.line(run.start.tokenizer.decode(group.rollouts[0].tokens, before=prompt.tokens))
            lines.append(f"  {word:<6}  {mark:<8}  {text}")
    return lines
