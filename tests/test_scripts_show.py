"""The frame of the shows and benches: bounds decide the exit code, results can be read later, caches are honest."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench  # noqa: E402
import record as records  # noqa: E402
import show  # noqa: E402

GOOD = '''"""Two and two."""
MINUTES = 0.1


def show(record):
    record.figure("sum", 2 + 2, at_least=4, at_most=4)
    record.figure("free", 7)
'''
BAD = GOOD.replace("at_least=4", "at_least=5")
LACKING = GOOD.replace('record.figure("free", 7)', 'record.data("no", "such", "file")')
BROKEN = GOOD.replace('record.figure("free", 7)', 'raise RuntimeError("broken")')
EMPTY = GOOD.replace(", at_least=4, at_most=4", "")


@pytest.fixture
def root(tmp_path) -> Path:
    """A checkout with the frame and no shows."""
    (tmp_path / "scripts" / "shows").mkdir(parents=True)
    (tmp_path / "scripts" / "benches").mkdir()
    for name in ("record.py", "show.py", "bench.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    return tmp_path


def run(root: Path, script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, f"scripts/{script}.py", *arguments], cwd=root, capture_output=True, text=True, timeout=120
    )


def test_every_show_and_bench_of_the_project_is_listed():
    shows, benches = show.shows(show.FOLDER), bench.benches(bench.FOLDER)
    assert [line.split()[0] for line in show.listing(shows).splitlines()] == list(shows)
    assert [line.split()[0] for line in bench.listing(benches).splitlines()] == list(benches)
    assert all(show.headline(file)[0] <= 30 for file in shows.values()), "at most 30 minutes each"


def test_a_bound_that_holds_exits_0_and_is_written(root):
    (root / "scripts/shows/two_and_two.py").write_text(GOOD)
    done = run(root, "show", "two-and-two")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()][2:4] == [
        ["sum", "4", ">=", "4", "and", "<=", "4", "ok"],
        ["free", "7"],
    ]
    result = json.loads((root / "scripts/results/two-and-two.json").read_text())
    assert result["figures"] == {"sum": 4, "free": 7} and result["ok"] is True
    assert result["bounds"] == {"sum": {"at_least": 4, "at_most": 4, "ok": True}}
    assert result["command"] == ["python", "scripts/show.py", "two-and-two"]
    assert set(result["versions"]) == {"python", "jax", "jaxlib", "flax", "optax", "numpy"}
    assert result["device"]["platform"] == "cpu" and result["device"]["count"] >= 1
    assert result["commit"] is None and result["dirty"] is True and result["seconds"] > 0


def test_a_bound_that_is_missed_exits_1_and_is_written_too(root):
    (root / "scripts/shows/two.py").write_text(BAD)
    assert show.run_one("two", root / "scripts/shows/two.py", [], root / "results") == 1
    result = json.loads((root / "results/two.json").read_text())
    assert result["ok"] is False and result["bounds"]["sum"]["ok"] is False


def test_missing_inputs_unknown_names_and_shows_without_a_bound(root, capsys):
    folder = root / "scripts/shows"
    (folder / "lacking.py").write_text(LACKING)
    (folder / "empty.py").write_text(EMPTY)
    assert show.main(["lacking"], folder, root / "results") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "such/file is missing; set JAXRL_DATA" in error
    assert show.main(["laking"], folder, root / "results") == 2
    assert "no show is called 'laking'; nearest is 'lacking'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="shows nothing"):
        show.main(["empty"], folder, root / "results")
    assert not (root / "results").exists()


def test_all_runs_every_show_though_one_fails(root):
    for name, text in dict(a=GOOD, b=BAD, c=BROKEN, d=LACKING).items():
        (root / f"scripts/shows/{name}.py").write_text(text)
    done = run(root, "show", "--all")
    assert done.returncode == 1
    assert [line.split() for line in done.stdout.splitlines()[-4:]] == [
        ["a", "ok"],
        ["b", "FAIL"],
        ["c", "FAIL"],
        ["d", "inputs", "missing"],
    ]
    for name in "bc":
        (root / f"scripts/shows/{name}.py").unlink()
    assert run(root, "show", "--all").returncode == 2


@pytest.mark.parametrize(
    "value, bounds, ok",
    [
        (0.5, dict(at_most=0.5), True),
        (0.5001, dict(at_most=0.5), False),
        (float("nan"), dict(at_most=0.5), False),
        (float("nan"), dict(at_least=0.5), False),
        (None, dict(at_least=0), False),
        (True, dict(at_least=1), False),
        (np.float32(0.5), dict(at_least=0.5), True),
        (np.array([1, 2]), dict(equals=[1, 2]), True),
        ("text", dict(equals="other"), False),
        (0, dict(equals=0), True),
        (1, dict(equals=0), False),
        (3, dict(at_least=1, at_most=2), False),
    ],
)
def test_bounds(value, bounds, ok):
    record = records.Record("x", [])
    record.figure("key", value, **bounds)
    assert record.ok is ok


def test_a_figure_is_written_once():
    record = records.Record("x", [])
    record.figure("key", 1)
    with pytest.raises(ValueError, match="written before, with value 1"):
        record.figure("key", 2)


def test_finished_work_is_kept_by_commit_and_never_on_a_changed_tree(root):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True, capture_output=True
        )

    git("init", "-q")
    (root / ".gitignore").write_text(".cache/\n")
    git("add", "."), git("commit", "-qm", "one")
    record, done = records.Record("x", [], root=root), []
    work = lambda: done.append(1) or {"n": np.int32(len(done))}  # noqa: E731
    assert [record.cached("seed0", work), record.cached("seed0", work), record.cached("seed1", work)] == [
        {"n": 1},
        {"n": 1},
        {"n": 2},
    ]
    (root / "scripts/results").mkdir()
    (root / "scripts/results/x.json").write_text("{}")  # a show's result is no change
    assert record.cached("seed0", work) == {"n": 1}
    (root / "new.py").write_text("")
    assert [record.cached("seed0", work), record.cached("seed0", work)] == [{"n": 3}, {"n": 4}]
    git("add", "new.py"), git("commit", "-qm", "two")
    assert record.cached("seed0", work) == {"n": 5}


def test_commands_run_in_the_root_and_failures_show_their_output(root):
    record = records.Record("x", [], root=root)
    assert (
        record.run("-c", "import os; assert os.environ['A'] == 'b'; open('here', 'w')", timeout_s=60, env={"A": "b"})
        > 0
    )
    assert (root / "here").is_file()
    with pytest.raises(RuntimeError, match="exited 3:\nwhy"):
        record.run("-c", "print('why'); raise SystemExit(3)", timeout_s=60)


def test_a_bench_writes_one_object(root, capsys):
    folder = root / "scripts/benches"
    (folder / "a_b.py").write_text('"""Speed."""\ndef bench(record):\n    record.figure("arg", record.args)\n')
    assert bench.main(["a-b", "--json", str(root / "out.json"), "--size=3"], folder) == 0
    result = json.loads((root / "out.json").read_text())
    assert result["figures"] == {"arg": ["--size=3"]} and result["name"] == "a-b"
    assert {"command", "versions", "device"} <= set(result)
    assert bench.main(["a-c"], folder) == 2 and "nearest is 'a-b'" in capsys.readouterr().err
    assert bench.main([], folder) == 0 and capsys.readouterr().out == "a-b  Speed.\n"
