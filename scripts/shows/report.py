"""The page, TensorBoard and W&B tell a run as its logs do: the demo, killed and resumed, in their own readers and in Chromium.

- The demo, shortened to 40 steps, writes TensorBoard and W&B (offline). It is killed with `kill -9` past its first
  checkpoint and resumed. The libraries' own readers must give the rows of metrics.jsonl, each step once.
- report.html of the demo, and of a copy with planted texts beside a pipelined run with drafts, is opened in headless
  Chromium, in desktop and phone width. The script reports no error, no request, and no overlapping or cut label.
- Screenshots are left in .cache/report. A person has to look at them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import curve_readers
import viewers

from jaxrl_post.data import tokenizer
from jaxrl_post.ring.types import Prompt
from jaxrl_post.runs import rollout_log

MINUTES = 6.0

STEPS, EVERY, KILLED_AFTER = 40, 10, 14  # killed past the first checkpoint, so that rows of both sides of it are there
LIMIT_S = 1800.0
LOGGERS = ("--config.logger.tensorboard=true", "--config.logger.wandb=offline")
DEMO = (
    "--config=configs/demo.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    f"--config.eval.every={EVERY}",
    "--config.scheduler.prompts=32",
    "--config.eval.prompts=64",
    *LOGGERS,
)
PIPELINE = (
    "--config=configs/demo.py",
    "--config.steps=24",
    "--config.scheduler.name=pipeline",
    "--config.scheduler.max_staleness=3",
    "--config.scheduler.prompts=16",
    "--config.speculation.drafter=ours",
    "--config.data.size=64",
    "--config.eval.prompts=16",
    "--config.eval.every=0",
)
PLANTED = "#90817263#"  # the demo's tokenizer has its characters, and no sum gives it
PARTS = ("jaxrl_post/telemetry/page/*.js", "jaxrl_post/telemetry/page/*.css", "jaxrl_post/telemetry/page/*.html")
BREAKING = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


def show(record) -> None:
    parts = [file for part in PARTS for file in record.root.glob(part)]
    record.figure("page.bytes_without_data", sum(file.stat().st_size for file in parts), at_most=60_000)
    python = viewers.python(record.root)
    viewers.browser(record.root)
    with tempfile.TemporaryDirectory() as folder:
        demo, pipeline, copy = (Path(folder) / name for name in ("demo", "pipeline", "planted"))
        _killed_and_resumed(record, python, demo)
        _curves(record, python, demo)
        _ran(record, python, "jaxrl_post.main", *PIPELINE, f"--run-dir={pipeline}")
        shutil.copytree(demo, copy, symlinks=True)
        _plant(copy)
        page = Path(folder) / "both.html"
        _ran(record, python, "jaxrl_post", "report", str(pipeline), str(copy), f"--out={page}")
        _data(record, page, pipeline)
        record.figure("demo.page_bytes", (demo / "report.html").stat().st_size, at_most=5_000_000)
        record.figure("both.page_bytes", page.stat().st_size, at_most=5_000_000)
        _seen(record, "demo", demo / "report.html", "")
        _seen(record, "both", page, PLANTED)
        _faults(record, page)
        said = _ran(record, python, "jaxrl_post", "watch", str(demo), "--once")
        record.figure("watch.says_the_end", f"ended at step {STEPS} of {STEPS}" in said, equals=True)


def _killed_and_resumed(record, python: Path, run: Path) -> None:
    command = [str(python), "-m", "jaxrl_post.main", *DEMO, f"--run-dir={run}", "--resume"]
    with open(run.with_name("first.log"), "w") as log:
        env = os.environ | {"PYTHONPATH": str(record.root)}
        process = subprocess.Popen(command, cwd=record.root, env=env, stdout=log, stderr=log)
    try:
        end = time.monotonic() + LIMIT_S
        while _last_step(run) < KILLED_AFTER and process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    record.figure("demo.step_at_the_kill", _last_step(run), at_least=KILLED_AFTER, at_most=STEPS - 1)
    record.figure("demo.exit_code_at_the_kill", process.returncode, equals=-signal.SIGKILL)
    _ran(record, python, "jaxrl_post.main", *DEMO, f"--run-dir={run}", "--resume")


def _last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def _curves(record, python: Path, run: Path) -> None:
    told = json.loads(record.said("scripts/curve_readers.py", run, timeout_s=LIMIT_S, python=python))
    rows = curve_readers.metrics(run)
    steps = len({step for _, step in rows})
    record.figure("metrics.points", told["metrics"], at_least=4000)
    record.figure("metrics.steps", steps, equals=STEPS + 1)
    for library in ("tensorboard", "wandb"):
        found = told[library]
        record.figure(f"{library}.points", found["points"], equals=told["metrics"])
        record.figure(f"{library}.steps", found["steps"], equals=steps)
        for fault in ("missing", "added", "twice", "different"):
            record.figure(f"{library}.{fault}", found[fault], equals=0)


def _plant(run: Path) -> None:
    """Replaces the first answer of the last step, and puts texts that would break a careless page into three places."""
    step = max(int(file.stem.removeprefix("step_")) for file in (run / "rollouts").glob("step_*.npz"))
    first, *others = rollout_log.read(run / "rollouts" / f"step_{step:06d}.npz")
    ids = tokenizer.load(run / "policy").encode(PLANTED, special=False)
    told = {"id": first.prompt.id, "tokens": first.prompt.tokens, "answer": BREAKING, "source": BREAKING}
    prompt = Prompt(**told)
    rollouts = [
        _changed(first.rollouts[0], prompt, ids),
        *(_changed(one, prompt, one.tokens) for one in first.rollouts[1:]),
    ]
    planted = type(first)(prompt=prompt, rollouts=tuple(rollouts), rewards=first.rewards, scored=first.scored)
    rollout_log.RolloutLog(run / "rollouts").write(step, [planted, *others])
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"name": BREAKING}))


def _changed(rollout, prompt, ids):
    kept = [min(place, len(rollout) - 1) for place in range(len(ids))]
    names = ("sampled", "logprobs", "entropies", "versions", "drafted")
    return type(rollout)(
        id=rollout.id,
        prompt=prompt,
        tokens=ids,
        finish=rollout.finish,
        start_clock=rollout.start_clock,
        finish_clock=rollout.finish_clock,
        **{name: getattr(rollout, name)[kept] for name in names},
    )


def _data(record, page: Path, pipeline: Path) -> None:
    """What the page says of the pipelined run, against its logs."""
    text = page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    told, copy = json.loads(text)["runs"]
    record.figure("both.breaking_text_is_kept", copy["config"]["name"] == BREAKING, equals=True)
    wanted = curve_readers.metrics(pipeline)
    curves = told["curves"]
    found = {
        (name, step): value
        for name, values in curves["metrics"].items()
        for step, value in zip(curves["steps"], values)
        if value is not None
    }
    finite = {key: values[-1] for key, values in wanted.items() if values[-1] == values[-1]}
    off = [abs(found.get(key, float("inf")) - value) / max(abs(value), 1e-30) for key, value in finite.items()]
    record.figure("pipeline.points", len(finite), at_least=1000)
    record.figure("pipeline.largest_relative_difference", max(off), at_most=1e-6)
    record.figure(
        "pipeline.rollouts_of_two_versions", sum(len(one["versions"]) > 1 for one in told["rollouts"]), at_least=1
    )
    record.figure("pipeline.drafted_tokens", sum(len(one["drafted"]) for one in told["rollouts"]), at_least=1)


def _seen(record, name: str, page: Path, planted: str) -> None:
    """Opens a page at both widths. One rollout has the planted text. Without one, the first 200 rollouts are listed."""
    out = record.root / ".cache" / "report" / name
    told = viewers.look(record.root, page, planted, out)
    record.figure(f"{name}.browser", told["browser"])
    record.figure(f"{name}.console_errors", told["errors"], equals=[])
    record.figure(
        f"{name}.requests_beside_the_page", [one for one in told["requests"] if not one.startswith("file:")], equals=[]
    )
    for width in ("desktop", "phone"):
        found = told[width]
        record.figure(f"{name}.{width}.drawn", found["drawn"], equals=True)
        record.figure(f"{name}.{width}.charts", found["charts"], at_least=14 if name == "demo" else 17)
        for fault in ("empty", "broken", "overlapping", "cut", "overflow"):
            record.figure(f"{name}.{width}.{fault}", found[fault], equals=0)
        record.figure(f"{name}.{width}.found", found["search"]["listed"], equals=1 if planted else 200)
        record.figure(f"{name}.{width}.marked", found["search"]["marked"], equals=planted)
    record.figure(f"{name}.screenshots", sorted(file.name for file in out.glob("*.png")))


def _faults(record, page: Path) -> None:
    """Plants an error, an image of another host, a margin that cuts labels and too many labels: each must be found."""
    text = page.read_text(encoding="utf-8")
    for before, after in (
        ("const LEFT = 50,", "const LEFT = 8,"),
        ("Math.floor(width / 90)", "Math.floor(width / 9)"),
        ("<main>", "<main><img src='https://localhost/planted.png'><script>throw new Error('planted')</script>"),
    ):
        if before not in text:
            raise RuntimeError(f"the page has no {before!r} in which a fault could be planted")
        text = text.replace(before, after)
    faulty = page.with_name("faulty.html")
    faulty.write_text(text, encoding="utf-8")
    found = viewers.look(record.root, faulty, PLANTED, faulty.with_suffix(""))
    said = " ".join(found["errors"])
    record.figure("planted_fault.error_is_found", "planted" in said, equals=True)
    record.figure("planted_fault.image_is_refused", "planted.png" in said or "img-src" in said, equals=True)
    record.figure("planted_fault.cut", found["desktop"]["cut"], at_least=1)
    record.figure("planted_fault.overlapping", found["desktop"]["overlapping"], at_least=1)


def _ran(record, python: Path, module: str, *arguments: str) -> str:
    env = {"PYTHONPATH": str(record.root)}
    return record.said("-m", module, *arguments, timeout_s=LIMIT_S, env=env, python=python)
