"""A run in a bucket: killed at ten moments through a faulty network, it ends as the local undisturbed run, bit for bit.

The bucket is fake-gcs-server in a process of its own. Runs reach it through a proxy that does a fault in 5 % of all calls:
it refuses, ends, loses, delays or cuts them. Each run is killed once, at a moment drawn from a fixed seed: two while they start,
eight each in its part of the steps. It is resumed as on another machine. After each kill all commits are read and checked
without the product's resume.

Then the bucket is lost for 60 s, a second run asks for a run that goes on, and a run is taken away from its holder.

A job of two processes follows, through the same network. It is killed five times: one process, the other, or both at once.
Then it gets a SIGTERM. It begins again by itself each time, and ends as the local job, bit for bit.

Two more runs lie in s3://, in moto's emulator, whose record is a sequence of objects. They are killed and resumed in the same way.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import bucket_server
import faulty_proxy
import joined_jobs
from bucket_jobs import ALL, BucketJobs, Kill
from bucket_runs import BucketRuns
from killed import LIMIT_S, Runs, differences

from jaxrl_post.runs import attempts
from jaxrl_post.runs.buckets import record as records

MINUTES = 24.0
SEEDS = tuple(range(10))
S3_SEEDS = (10, 11)
STARTING = 2  # runs killed while they start; each of the others is killed in its own part of the steps
STEPS, EVERY = 30, 2
LONG = 400  # steps of a run that is still going on when another one asks for it
SHARE, LOST_S = 0.05, 60.0
COMMAND = [
    "--config=configs/demo.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    "--config.scheduler.prompts=16",
    "--config.eval.prompts=4",
    "--config.eval.every=10",
]
PROCESSES, JOB_STEPS = 2, 20
JOB = [f"--config.steps={JOB_STEPS}", "--config.mesh.data=1", "--config.mesh.fsdp=2", *joined_jobs.SMALL]
KILLS = (
    *(Kill(process=who, step=step) for who, step in ((ALL, 0), (1, 1), (0, 3), (ALL, 5), (1, 7))),
    Kill(process=ALL, step=9, by=signal.SIGTERM),
)
ONE_MACHINE = (".lock",)  # files that no bucket has


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder, bucket_server.emulator() as server:
        here = Path(folder)
        local = Runs(record, here, COMMAND, STEPS)
        local.finish("cold")  # fills the compilation cache
        record.figure("local_run.seconds", round(local.finish("whole")[1], 2))
        with bucket_server.proxy(server, SHARE) as faulty:
            _killed(record, BucketRuns(record, here, COMMAND, STEPS, server, faulty), SEEDS, STARTING)
            _faults(record, bucket_server.faults(faulty))
        with bucket_server.proxy(server, SHARE, seed=1) as faulty:
            _job(record, BucketRuns(record, here, JOB, JOB_STEPS, server, faulty))
            done = bucket_server.faults(faulty)
            record.figure("job.faults", sum(done.get(kind, 0) for kind in faulty_proxy.KINDS), at_least=20)
        _lost(record, BucketRuns(record, here, COMMAND, STEPS, server, bucket_server.free_port()), server)
        _leases(record, BucketRuns(record, here, [*COMMAND, f"--config.steps={LONG}"], LONG, server, server))
        _in_s3(record, here)


def _in_s3(record, here: Path) -> None:
    with bucket_server.emulator("s3") as server, bucket_server.proxy(server, SHARE) as faulty:
        runs = BucketRuns(record, here, COMMAND, STEPS, server, faulty, "s3")
        resumed, _ = _resumed(record, runs, S3_SEEDS, 0, "s3_")
        done = bucket_server.faults(faulty)
    share = sum(done.get(kind, 0) for kind in faulty_proxy.KINDS) / done["calls"]
    record.figure("s3_kills.resumed_from_a_commit", resumed, at_least=1)
    record.figure("s3_faults.calls", done["calls"])
    record.figure("s3_faults.share", round(share, 4), at_least=0.03, at_most=0.07)


def _killed(record, runs: BucketRuns, seeds: Sequence[int], starting: int) -> None:
    """Kills a run for each seed, looks at what is committed, and resumes it."""
    _, seconds = runs.ended("undisturbed")
    record.figure("run_in_a_bucket.seconds", round(seconds, 2))
    record.figure("run_in_a_bucket.what_differs", _differs(runs, "undisturbed"), equals=[])
    resumed, orphans = _resumed(record, runs, seeds, starting)
    record.figure("kills.resumed_from_a_commit", resumed, at_least=5)
    record.figure("kills.within_an_upload", orphans, at_least=2)


def _resumed(record, runs: BucketRuns, seeds: Sequence[int], starting: int, prefix: str = "") -> tuple[int, int]:
    """Kills and resumes runs. Returns how many were resumed from a commit, and how many were killed in an upload.

    Args:
      starting: so many are killed while they start. Each of the others is killed in its own part of the steps.
    """
    orphans, resumed = 0, 0
    for number, seed in enumerate(seeds):
        name, noise, of = f"killed-{seed}", random.Random(seed), f"{prefix}kill_{seed}"
        if number < starting:
            killed = runs.killed_after(name, noise.random() * 8)
        else:
            part = (number - starting + noise.random()) / (len(seeds) - starting)
            killed = runs.killed_at_step(name, step := 1 + int(part * (STEPS - 2)), noise.random())
            record.figure(f"{of}.step", step)
        record.figure(f"{of}.killed", killed, equals=True)
        found = runs.steps(name)
        orphans += bool(runs.orphans(name))
        record.figure(f"{of}.committed_steps", found)
        record.figure(f"{of}.half_written", runs.damages(name), equals=[])
        said, _ = runs.ended(name)
        if found:
            resumed += 1
            record.figure(f"{of}.chose_the_newest", f"goes on after step {found[0]}\n" in said, equals=True)
        record.figure(f"{of}.what_differs", _differs(runs, name), equals=[])
    return resumed, orphans


def _differs(runs: BucketRuns, name: str) -> list[str]:
    """Returns in what a run of the bucket differs from the local undisturbed one."""
    return [one for one in runs.differences(runs.here / "whole", runs.fetched(name)) if one not in ONE_MACHINE]


def _faults(record, done: dict[str, int]) -> None:
    for kind in faulty_proxy.KINDS:
        record.figure(f"faults.{kind}", done.get(kind, 0), at_least=3)
    share = sum(done.get(kind, 0) for kind in faulty_proxy.KINDS) / done["calls"]
    record.figure("faults.calls", done["calls"])
    record.figure("faults.share", round(share, 4), at_least=0.04, at_most=0.06)


def _job(record, runs: BucketRuns) -> None:
    """Runs a job of several processes on this machine's disk, and in the bucket, where it is killed again and again."""
    options = [f"--config={runs.root / 'configs' / 'demo' / 'sharded.py'}", *JOB]
    jobs = BucketJobs(runs, PROCESSES, options)
    begun = time.monotonic()
    cache = runs.here / "cache-job"
    code = joined_jobs.run(joined_jobs.started(runs.root, "kubernetes", PROCESSES, runs.here / "job", options, cache))
    record.figure("job.local_seconds", round(time.monotonic() - begun, 1))
    record.figure("job.local_exit_code", code, equals=0)
    begun = time.monotonic()
    if record.figure("job.exit_code", jobs.ended("killed-job", KILLS), equals=0) != 0:
        raise RuntimeError(joined_jobs.said(runs.here / "killed-job"))
    record.figure("job.seconds", round(time.monotonic() - begun, 1))
    record.figure("job.committed_at_each_kill", jobs.found)
    record.figure("job.half_written", [one for found in jobs.damages for one in found], equals=[])
    told = attempts.bucket_status(runs.url("killed-job"))
    print(told, flush=True)
    record.figure("job.kills", len(jobs.found), equals=len(KILLS))
    record.figure("job.restarts_that_the_bucket_knows", told.restarts, equals=len(KILLS))
    back = runs.fetched("killed-job")
    found = [one for one in differences(runs.here / "job", back, JOB_STEPS) if one not in ONE_MACHINE]
    record.figure("job.what_differs", found, equals=[])


def _lost(record, runs: BucketRuns, server: int) -> None:
    """Loses the bucket for a minute, from the first commit on."""
    with bucket_server.proxy(server, 0.0, port=runs.through):
        process = runs.begin("lost")
        runs.wait_for(lambda: bool(runs.steps("lost")), process)
    then = runs.steps("lost")
    time.sleep(LOST_S)
    record.figure("lost_bucket.seconds", LOST_S, at_least=60)
    record.figure("lost_bucket.newest_commit", then[0], at_most=STEPS - 1)
    record.figure("lost_bucket.commits_meanwhile", runs.steps("lost") != then, equals=False)
    with bucket_server.proxy(server, 0.0, port=runs.through):
        said = process.communicate(timeout=LIMIT_S)[0]
    record.figure("lost_bucket.exit_code", process.returncode, equals=0)
    record.figure("lost_bucket.lines_that_say_so", said.count("uploads wait"), equals=1)
    record.figure("lost_bucket.what_differs", _differs(runs, "lost"), equals=[])


def _leases(record, runs: BucketRuns) -> None:
    """Asks for a run that goes on, and then takes it away from its holder."""
    process = runs.begin("held")
    runs.wait_for(lambda: bool(runs.steps("held")), process)
    process_two = runs.met("held")
    refusal = f"is in use by process {process.pid} on host"
    record.figure("second_run.exit_code", process_two.returncode, equals=1)
    record.figure("second_run.names_the_holder", refusal in process_two.stderr, equals=True)
    objects = runs.objects("held")
    there = records.read(objects)
    records._written(objects, there, there.term + 1, records._myself(), there.commits)
    said, before = process.communicate(timeout=LIMIT_S)[0], records.read(objects)
    record.figure("taken_run.exit_code", process.returncode, equals=1)
    record.figure("taken_run.says_so", "this run stops, and writes there no more" in said, equals=True)
    record.figure("taken_run.commits_afterwards", before.commits != there.commits, equals=False)
