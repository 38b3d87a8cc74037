"""The terminal view: its numbers are those of the files, and it follows a run to its end."""

from __future__ import annotations

import io
import json
import os

import made_run
import pytest
import rich.console

from jaxrl_post.commands import report, watch
from jaxrl_post.runs.run_logs import opened
from jaxrl_post.telemetry import screen
from jaxrl_post.telemetry.page import document


def drawn(run, *, now: float = 0.0) -> str:
    out = rich.console.Console(file=io.StringIO(), width=400)
    out.print(screen.picture(opened(run), 100, now))
    return out.file.getvalue()


def test_a_sparkline_by_hand():
    assert screen.sparkline([0, 7, 14], 0, 14) == "▁▅█"  # half of 7 levels, rounded to the even one
    assert screen.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == "▁▂▃▄▅▆▇█"
    assert screen.sparkline([2.0, 2.0], 2.0, 2.0) == "▁▁"
    assert screen.averaged([0, 2, 4, 6], 2) == [1, 5] and screen.averaged([0, 7, 14], 10) == [0, 7, 14]
    assert screen.sparkline(screen.averaged(range(3200), 32), 0, 3199)[::31] == "▁█"


def test_runs_that_learn_what_is_written_show_loss_and_no_reward(tmp_path):
    run = made_run.make(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"engine": {"name": "demonstrations"}}))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"actor/pg_loss": 1.5, "rewards/margins": 0.25} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, names = drawn(run), {*document.data([run])["runs"][0]["curves"]["metrics"]}
    assert "1.5000  loss" in text and "0.2500  margin" in text and "  reward  " not in text
    assert {"actor/pg_loss", "rewards/margins", "response_length/mean"} <= names
    assert not [name for name in names if name.startswith(("critic/score", "critic/rewards", "reward/", "frac_reward"))]


def test_the_picture_of_a_run_that_goes_on(tmp_path):
    run = made_run.make(tmp_path / "run", ended=False)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"steps": 15}))
    os.utime(run / "metrics.jsonl", (1000.0, 1000.0))
    text = drawn(run, now=1042.0)
    assert "step 3 of 15, 42 s ago, about 2 min left" in text  # 12 steps of 10 s
    assert "step 3 of 15, by a clock 3,600 s ahead of this one, about 2 min left" in drawn(run, now=1000.0 - 3600.0)
    assert "0.6333  reward     ▁▅█  0.4333 to 0.6333" in text and "7.0  length" in text
    assert "generating 50.0%, training 30.0%, rewards 10.0%, else 10.0%" in text
    assert "sums/acc/greedy 0.0000 -> 1.0000" in text and "0 50%, 1 50%" in text
    assert "steps with an alarm: 1, the last is 2" in text and "ALARM now" not in text


def test_before_the_first_step_and_after_the_end(tmp_path):
    run = made_run.make(tmp_path / "run")
    assert "ended at step 3 of 3, after 12 s" in drawn(run)
    (run / "metrics.jsonl").write_text("")
    assert "no step has ended yet" in drawn(run)


def test_an_alarm_that_lasts_is_named(tmp_path):
    assert "ALARM now: low_entropy" in drawn(made_run.make(tmp_path / "run", steps=2))


def test_it_follows_a_run_until_its_end(tmp_path):
    run, looks = made_run.make(tmp_path / "run", ended=False), []

    def wait():
        looks.append(1)
        if len(looks) == 3:
            (run / "summary.json").write_text('{"steps": 3, "seconds": 5}')

    out = io.StringIO()
    watch.follow(opened(run), rich.console.Console(file=out, width=400), wait)
    assert len(looks) == 3 and "ended at step 3 of 3, after 5 s" in out.getvalue()


def test_the_commands(tmp_path, capsys):
    run = made_run.make(tmp_path / "run")
    assert watch.main([str(run), "--once"]) == 0 and "reward" in capsys.readouterr().out
    assert report.main([str(run)]) == 0 and (run / "report.html").stat().st_size > 10_000
    assert report.main([str(run), f"--out={tmp_path / 'page.html'}"]) == 0 and (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    "command, arguments, words",
    [
        (watch, ["none"], "none: there is no such folder; name the folder of a run"),
        (watch, ["gs://b/run"], "is a URL"),
        (watch, ["none", "--every=0"], "--every=0 must be at least 0.1 seconds"),
        (watch, [], "write python -m jaxrl_post watch RUN"),
        (report, [], "write python -m jaxrl_post report RUN [RUN ...] [--out=FILE]"),
        (report, ["none"], "none: there is no such folder"),
        (report, ["none", "--out=https://x/y"], "is a URL"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, capsys, command, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 1
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1 and not [*tmp_path.iterdir()]
