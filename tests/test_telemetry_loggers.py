"""Writers of TensorBoard and Weights & Biases: what they wrote is metrics.jsonl, also after a kill and a resume.

TensorBoard's files are read here record by record, as its format says. The show `report` asks the libraries' own readers.
"""

from __future__ import annotations

import json
import struct
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from config_arms import error, given

from jaxrl_post import config, main
from jaxrl_post.runs import metric_rows
from jaxrl_post.telemetry import loggers

NAN = float("nan")
ROWS = (
    {"step": 0, "val-core/x/mean@4": 0.1},
    {"step": 1, "loss": 1 / 3, "norm": NAN},
    {"step": 2, "loss": 0.25, "norm": 7.0},
    {"step": 2, "val-core/x/mean@4": 0.9},
)
AFTER = ({"step": 3, "loss": 0.125, "norm": 1e9}, {"step": 3, "val-core/x/mean@4": 1.0})


def records(file: Path):
    """Yields the bytes of each record: uint64 length, crc, data, crc (TFRecord)."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Reads the files in order. A restart drops what has its step or a later one."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        for data in records(file):
            event = Event.FromString(data)
            if event.session_log.status == SessionLog.START:
                found = {name: [one for one in line if one[0] < event.step] for name, line in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return {name: line for name, line in found.items() if line}


def wanted(rows) -> dict[str, list[tuple[int, float]]]:
    out: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name in row.keys() - {"step"}:
            out.setdefault(name, []).append((row["step"], float(np.float32(row[name]))))
    return out


def write(writers, rows) -> None:
    for row in rows:
        for writer in writers:
            writer.write(row["step"], {name: value for name, value in row.items() if name != "step"})


def same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_equal(found[name], expected[name], err_msg=name)


def board(place: Path, kept=()):
    return loggers.opened(config.LoggerConfig(tensorboard=True), place, {}, kept)


def test_tensorboard_has_the_rows_without_close(tmp_path):
    (writer,) = board(tmp_path)
    write([writer], ROWS)
    same(curves(tmp_path / "tensorboard"), wanted(ROWS))
    writer.close()


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_a_resumed_curve_has_each_step_once(tmp_path, kept):
    """Killed after all ROWS and resumed from `kept` of them: the rest is written again, with other values."""
    (killed,) = board(tmp_path)
    write([killed], ROWS)
    killed.close()  # it adds nothing to what a kill leaves
    again = [{name: value * 2 if name != "step" else value for name, value in row.items()} for row in ROWS[kept:]]
    (writer,) = board(tmp_path, ROWS[:kept])
    write([writer], [*again, *AFTER])
    writer.close()
    writer.close()
    same(curves(tmp_path / "tensorboard"), wanted([*ROWS[:kept], *again, *AFTER]))


def test_a_resumed_curve_does_not_go_by_the_clock(tmp_path, monkeypatch):
    """The clock is set back by a day at every start: the newest file still comes last."""
    now = time.time()
    for start in range(3):
        monkeypatch.setattr(time, "time", lambda start=start: now - start * 86400.0)
        (writer,) = board(tmp_path, ROWS[: 1 + start])
        write([writer], [*ROWS[1 + start :], *AFTER])
        writer.close()
    same(curves(tmp_path / "tensorboard"), wanted([*ROWS, *AFTER]))


def test_a_full_disk_is_named_and_the_writer_closes(tmp_path, monkeypatch):
    (writer,) = board(tmp_path)
    monkeypatch.setattr(writer._file, "flush", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device: '.*tensorboard/events.out"):
        write([writer], ROWS)
    writer.close()


def test_a_writer_that_is_chosen_at_a_resume_has_the_whole_curve(tmp_path):
    (writer,) = board(tmp_path, ROWS)
    write([writer], AFTER)
    writer.close()
    same(curves(tmp_path / "tensorboard"), wanted([*ROWS, *AFTER]))


def test_infinite_values_are_nan_as_in_metrics(tmp_path):
    (writer,) = board(tmp_path)
    write([writer], [{"step": 1, "loss": float("inf")}])
    writer.close()
    same(curves(tmp_path / "tensorboard"), {"loss": [(1, NAN)]})


class Server:
    """Stands for the library wandb: keeps every call of init, and merges rows by step as it does."""

    def __init__(self, starting_step: int = 0):
        self.asked, self.rows, self.finished = [], {}, 0
        self.starting_step = starting_step
        self.Settings = dict
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))

    def init(self, **asked):
        self.asked.append(asked)
        return self

    def log(self, row, step):
        assert step >= max(self.rows, default=self.starting_step), "it would drop this row"
        self.rows.setdefault(step, {}).update(row)

    def finish(self):
        self.finished += 1


@pytest.fixture
def server(monkeypatch):
    library = Server()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: object())
    return library


def merged(rows) -> dict[int, dict]:
    out: dict[int, dict] = {}
    for row in rows:
        out.setdefault(row["step"], {}).update({name: value for name, value in row.items() if name != "step"})
    return out


def test_wandb_gets_the_rows_and_offline_writes_them_again_under_one_id(tmp_path, server):
    about = config.LoggerConfig(wandb="offline", project="mine")
    (writer,) = loggers.opened(about, tmp_path, {"steps": 3}, ())
    write([writer], ROWS)
    np.testing.assert_equal(server.rows, merged(ROWS))
    (first,) = server.asked
    old = tmp_path / "wandb" / f"offline-run-20260101_000000-{first['id']}"
    other = tmp_path / "wandb" / "offline-run-20260101_000000-other"
    old.mkdir(parents=True), other.mkdir()
    server.rows = {}
    (writer,) = loggers.opened(about, tmp_path, {"steps": 3}, ROWS[:2])
    write([writer], AFTER)
    writer.close()
    writer.close()
    np.testing.assert_equal(server.rows, merged([*ROWS[:2], *AFTER]))
    assert server.finished == 1 and not old.exists() and other.exists()
    assert server.asked[1] == first and first["project"] == "mine" and first["name"] == tmp_path.name
    assert first["config"] == {"steps": 3} and first["mode"] == "offline" and first["resume"] is None


def test_wandb_online_is_sent_no_step_that_it_has(tmp_path, server):
    server.starting_step = 3  # it has steps 0 to 2
    (writer,) = loggers.opened(config.LoggerConfig(wandb="online"), tmp_path, {}, ROWS[:2])
    write([writer], [*ROWS[2:], *AFTER])
    np.testing.assert_equal(server.rows, merged(AFTER))
    assert server.asked[0]["resume"] == "allow" and server.asked[0]["mode"] == "online"


def test_a_refusal_of_wandb_is_one_sentence(tmp_path, server, monkeypatch):
    def refuse(**_):
        raise server.errors.Error("api_key not configured\n(no-tty)")

    monkeypatch.setattr(server, "init", refuse)
    with pytest.raises(ValueError, match=r"logger\.wandb=online: api_key not configured \(no-tty\); log in with"):
        loggers.opened(config.LoggerConfig(wandb="online"), tmp_path, {}, ())


@pytest.mark.parametrize(
    "option, library", [("tensorboard=true", "tensorboardX"), ("wandb=offline", "wandb"), ("wandb=online", "wandb")]
)
def test_a_missing_library_is_one_sentence_before_anything_is_made(tmp_path, monkeypatch, capsys, option, library):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None if name == library else object())
    run = tmp_path / "run"
    assert main.main(["--config=configs/demo.py", f"--config.logger.{option}", f"--run-dir={run}"]) == 1
    said = capsys.readouterr()
    extra = option.partition("=")[0]
    assert said.out == "" and said.err == (
        f"error: logger.{option} needs the library {library}, which is not installed: "
        f"pip install 'jaxrl_post[{extra}]', or leave the option out\n"
    )
    assert not run.exists()


def test_options_that_nothing_would_read_are_refused():
    assert "logger.project" in error("logger.project=mine")
    assert "nearest is 'offline'" in error("logger.wandb=ofline")
    assert config.resolve(given(), ("logger.wandb=offline", "logger.project=mine")).logger.project == "mine"


@pytest.mark.extended
def test_metrics_and_tensorboard_of_a_resumed_run_are_equal(tmp_path, monkeypatch, quick_compilation):
    """The demo with a small engine and two steps; then resumed to four, from a checkpoint at step 2."""
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    arguments = [
        "--config=configs/demo.py",
        *(
            f"--config.{one}"
            for one in ("scheduler.prompts=4", "scheduler.group_size=4", "eval.prompts=4", "eval.every=0")
        ),
        *(f"--config.{one}" for one in ("engine.slots=16", "engine.row_sizes=(32,)", "data.size=64")),
        *(
            "--config.checkpoint.every=2",
            "--config.logger.tensorboard=true",
            f"--run-dir={tmp_path / 'run'}",
            "--resume",
        ),
    ]
    for steps in (2, 4):
        assert main.main([*arguments, f"--config.steps={steps}"]) == 0
    rows = metric_rows.read(tmp_path / "run" / "metrics.jsonl")
    same(curves(tmp_path / "run" / "tensorboard"), wanted(rows))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
    page = (tmp_path / "run" / "report.html").read_text()
    (told,) = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"]
    assert told["curves"]["steps"] == [0, 1, 2, 3, 4] and len(told["rollouts"]) == 4 * 16 + 2 * 20
