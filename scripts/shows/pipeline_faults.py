"""Faults in the midst of pipelined generation: each is said, counted or survived, and none changes a token.

- Refused: weights of another tree, of another shape, not finite, or of no later version leave the old ones running. The
  error names the check that failed. Running rollouts end as if nothing had been tried. In two processes both refuse,
  also where weights are not finite in one of them alone.
- Torn: a swap that fails after its checks ends the run with exit code 42. Resumed, it ends bit for bit as the
  undisturbed run.
- Slow: a reward that takes ten times as long as generation changes seconds and nothing else. Clocks, tokens, versions
  and weights are the same.
- Dead: a judge endpoint that stops answering in mid-run leaves samples unscored. They are masked and counted, and the
  run goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from killed import Runs

MINUTES = 6.0
STEPS = 10
COMMAND = [
    "--config=configs/demo_pipeline.py",
    f"--config.steps={STEPS}",
    "--config.checkpoint.every=3",
    "--config.scheduler.prompts=16",
    "--config.scheduler.group_size=4",
    "--config.scheduler.max_unscored=32",
    "--config.engine.steps_per_dispatch=4",
    "--config.eval.prompts=0",
    "--config.eval.every=0",
]
SLOW = """
import os
import time
from jaxrl_post.rewards.math import exact

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(os.environ.get("SLOW_S", 0)))
    return exact(data_source, solution_str, ground_truth, extra_info)
"""
TORN = """
import sys
import jax
from jaxrl_post import main
from jaxrl_post.parallel import weight_sync
sound, calls = weight_sync.WeightLayout._replaced, []

def fails(self, *given):
    calls.append(1)
    if len(calls) == 3:
        raise jax.errors.JaxRuntimeError("INTERNAL: planted")
    return sound(self, *given)

weight_sync.WeightLayout._replaced = fails
sys.exit(main.main(sys.argv[1:]))
"""

SENTENCES = {
    "tree": "in another tree",
    "shape": "has shape (",
    "finite": "not finite",
    "version": "must be greater than",
}

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests"), str(record.root / "scripts")]
    _refused(record)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "slow.py").write_text(SLOW)
        _refused_everywhere(record, here)
        runs = Runs(record, here, [*COMMAND, f"--config.reward.functions=('{here}/slow.py:score',)"], STEPS)
        runs.finish("whole")
        _torn(record, runs)
        _slow(record, runs)
        _dead(record, here)


def _refused(record) -> None:
    import engine_lab as lab
    import numpy as np

    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    asked, old = lab.requests(32, samples=4, seed=5), lab.weights(0)
    homes = meshes.param_shardings(meshes.make_mesh(), decoder.axes(lab.TINY), "engine")
    wrong = {
        "tree": ({name: leaf for name, leaf in old.items() if name != "final_norm"}, 5),
        "shape": ({**old, "final_norm": np.ones(3, np.float32)}, 5),
        "finite": ({**old, "final_norm": old["final_norm"] * np.nan}, 5),
        "version": (old, 0),
    }
    want = lab.run(lab.engine(), asked)
    for check, (params, version) in wrong.items():
        engine = lab.engine()
        engine.submit(asked)
        out = {r.id: r for _ in range(2) for r in engine.step()}
        try:
            engine.swap(params if check in ("tree", "shape") else meshes.put(params, homes), version)
            said = "nothing"
        except ValueError as error:
            said = str(error)
        while engine.pending:
            out.update((r.id, r) for r in engine.step())
        record.figure(f"refused.{check}.said", said)
        record.figure(f"refused.{check}.names_the_check", SENTENCES[check] in said, equals=True)
        record.figure(f"refused.{check}.version_in_use", engine.version, equals=0)
        record.figure(f"refused.{check}.same_bits", lab.same_bits(out, want), equals=True)


def _refused_everywhere(record, here: Path) -> None:
    """Tries the refused weights in two processes of four devices each, two of which learn and two generate."""
    import processes

    split = [
        *COMMAND,
        "--config.mesh.fsdp=4",
        "--config.mesh.engine=4",
        "--config.engine.slots=16",
        "--config.checkpoint.every=0",
        "--config.engine.row_sizes=(16,32)",
    ]
    tried, plain = here / "tried", here / "plain"
    processes.run(
        record.root, ["scripts/refused_publish.py", str(tried), *split, f"--run-dir={tried}"], processes=2, devices=4
    )
    processes.run(record.root, ["-m", "jaxrl_post.main", *split, f"--run-dir={plain}"], processes=2, devices=4)
    told = [json.loads(Path(f"{tried}.{index}.json").read_text()) for index in (0, 1)]
    for check, sentence in SENTENCES.items():
        record.figure(f"two_processes.{check}.said", told[1][check]["said"])
        record.figure(
            f"two_processes.{check}.both_name_the_check",
            all(sentence in one[check]["said"] for one in told),
            equals=True,
        )
        record.figure(
            f"two_processes.{check}.old_version_stays_in_both",
            all(one[check]["version"] == one[check]["before"] for one in told),
            equals=True,
        )
    for index in (0, 1):
        folders = [place / f"process_{index}" / "rollouts" for place in (tried, plain)]
        record.figure(
            f"two_processes.process_{index}_ends_as_if_nothing_had_been_tried",
            processes.same_files(*folders),
            equals=True,
        )


def _torn(record, runs: Runs) -> None:
    arguments = [*runs.begun("torn")[3:]]
    done = subprocess.run(
        [sys.executable, "-c", TORN, *arguments],
        cwd=record.root,
        env=runs.environment(),
        text=True,
        capture_output=True,
        timeout=600,
    )
    record.figure("torn.exit_code", done.returncode, equals=42)
    record.figure("torn.said", done.stderr.strip().splitlines()[-1][:200])
    runs.finish("torn")
    record.figure(
        "torn.what_differs_after_resuming", runs.differences(runs.here / "whole", runs.here / "torn"), equals=[]
    )


def _slow(record, runs: Runs) -> None:
    """Gives each reward as many seconds as make all rewards take ten times as long as generation."""
    rows = _rows(runs.here / "whole")
    generated = sum(row.get("timing_s/gen", 0.0) for row in rows)
    answers, workers = STEPS * 16 * 4, 1
    os.environ["SLOW_S"] = str(10 * generated * workers / answers)
    try:
        runs.finish("slow")
    finally:
        del os.environ["SLOW_S"]
    waited = sum(row.get("timing_s/reward_wait", 0.0) for row in _rows(runs.here / "slow"))
    record.figure("slow.generation_s", generated)
    record.figure("slow.seconds_waited_for_rewards", waited, at_least=2 * generated)
    record.figure("slow.what_differs", runs.differences(runs.here / "whole", runs.here / "slow"), equals=[])


def _dead(record, here: Path) -> None:
    """Runs with an endpoint that judges correctly for 5 batches and then refuses."""
    asked = []

    class Judging(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer, truth = body["messages"][0]["content"].split("|")
            asked.append(answer)
            dead = len(asked) > 5 * 16 * 4
            self.send_response(503 if dead else 200)
            self.end_headers()
            text = f"VERDICT: {int(answer.rpartition('#')[2] == truth)}"
            self.wfile.write(b"" if dead else json.dumps({"choices": [{"message": {"content": text}}]}).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judging)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (here / "judged.py").write_text(
        "from jaxrl_post.rewards.judge import Judge\n"
        f"score = Judge('http://127.0.0.1:{server.server_address[1]}/v1', model='m', question='{{answer}}|{{truth}}', "
        "deadline_s=0.5, attempts=2)\n"
    )
    record.run(
        "-m",
        "jaxrl_post.main",
        *COMMAND,
        f"--run-dir={here / 'dead'}",
        "--config.checkpoint.every=0",
        f"--config.reward.functions=('{here}/judged.py:score',)",
        timeout_s=900,
    )
    server.shutdown()
    rows = _rows(here / "dead")
    record.figure("dead.steps", len(rows), equals=STEPS)
    record.figure("dead.answers_unscored", sum(row["reward/unscored"] for row in rows), at_least=64)
    record.figure("dead.answers_scored_before", 64 * STEPS - sum(row["reward/unscored"] for row in rows), at_least=64)
    masked = [row for row in rows if "critic/score/mean" not in row]
    record.figure("dead.steps_without_a_score", len(masked), at_least=2)
    record.figure(
        "dead.those_that_moved_nothing", sum(row["training/skipped_updates"] for row in masked), equals=len(masked)
    )


def _rows(run: Path) -> list[dict]:
    from jaxrl_post.telemetry import metrics

    return [row for row in metrics.read(run / "metrics.jsonl") if "actor/grad_norm" in row]
