"""The frame of the shows and benches: bounds decide the exit code, results can be read later, caches are honest."""

from __future__ import annotations

import json
import os
import re
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
import sources  # noqa: E402

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
    for name in ("record.py", "sources.py", "show.py", "bench.py"):
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
    long = {name for name, file in shows.items() if show.headline(file)[0] > 30}
    assert long == {"ci", "compile-experts", "compile-hybrids", "curriculum", "faults", "quantised", "suite"}, (
        "at most 30 minutes each; runs of all tests need more, 30 whole runs of the demo, every kind of fault, and whole "
        "programs with experts for three kinds of devices"
    )


def test_a_bound_that_holds_exits_0_and_is_written(root, monkeypatch):
    (root / "scripts/shows/two_and_two.py").write_text(GOOD)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(root))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
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
    assert list(result["sources"]) == ["scripts/shows/two_and_two.py"]
    assert result["flags"]["XLA_FLAGS"] == "--xla_dump_to=" and "JAX_PLATFORMS" not in result["flags"]
    assert result["flags"]["JAX_COMPILATION_CACHE_DIR"] == "set"  # its value is a folder of one machine
    assert result["machine"]["cpu"] and result["machine"]["cores"] == os.cpu_count()
    total = re.search(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert total is None or abs(result["machine"]["memory_gib"] - int(total[1]) / 2**20) < 1


def test_a_bound_that_is_missed_exits_1_and_is_written_too(root):
    (root / "scripts/shows/two.py").write_text(BAD)
    assert show.run_one("two", root / "scripts/shows/two.py", [], root / "results") == 1
    result = json.loads((root / "results/two.json").read_text())
    assert result["ok"] is False and result["bounds"]["sum"]["ok"] is False


def test_a_part_of_a_show_writes_no_result(root, capsys):
    file, results = root / "scripts/shows/two_and_two.py", root / "results"
    file.write_text(GOOD)
    assert show.run_one("two-and-two", file, [], results) == 0
    whole = (results / "two-and-two.json").read_bytes()
    file.write_text(GOOD + "\n# another text\n")
    assert show.run_one("two-and-two", file, ["--arms=sum"], results) == 0
    assert "no result is written" in capsys.readouterr().out and (results / "two-and-two.json").read_bytes() == whole


def test_missing_inputs_unknown_names_and_shows_without_a_bound(root, capsys):
    folder = root / "scripts/shows"
    (folder / "lacking.py").write_text(LACKING)
    (folder / "empty.py").write_text(EMPTY)
    assert show.main(["lacking"], folder, root / "results") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "such/file is missing; set JAXRL_DATA" in error
    assert show.main(["laking"], folder, root / "results") == 2
    assert "no show is called 'laking'; nearest is 'lacking'" in capsys.readouterr().err
    (folder / "suite.py").write_text(LACKING)
    assert show.main(["variants", "--x=1"], folder, root / "results") == 2
    assert "the show variants is now: python scripts/show.py suite --arms=shown" in capsys.readouterr().err
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


@pytest.fixture
def git(root):
    """Runs git in a new repository whose one commit holds the frame."""

    def git(*arguments) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (root / ".gitignore").write_text(".cache/\n")
    git("add", "."), git("commit", "-qm", "one")
    return git


def test_finished_work_is_kept_by_commit_and_never_on_a_changed_tree(root, git):
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


@pytest.mark.parametrize(
    "name, value",
    [
        ("versions", lambda: {"python": "2.7"}),
        ("flags", lambda: {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
        ("machine", lambda: {"cpu": "abacus", "cores": 10}),
    ],
)
def test_finished_work_is_kept_by_versions_flags_and_machine(root, git, monkeypatch, name, value):
    def work(result):
        return records.Record("x", [], root=root).cached("key", lambda: result)

    assert [work(1), work(2)] == [1, 1]
    with monkeypatch.context() as other:
        other.setattr(records, name, value)
        assert [work(3), work(4)] == [3, 3]
    assert work(5) == 1
    assert records.Record("x", [], ["--seed=1"], root=root).cached("key", lambda: 6) == 6


PROJECT = {  # a small project: what a show names by imports, dotted names and paths
    "jaxrl_post/__init__.py": "",
    "jaxrl_post/main.py": "from jaxrl_post.engine import rows",
    "jaxrl_post/engine/__init__.py": "",
    "jaxrl_post/engine/rows.py": "def f():\n    from ..kernels import attention\n    return 'jaxrl_post.rewards:exact'",
    "jaxrl_post/kernels/__init__.py": "",
    "jaxrl_post/rewards.py": "LIMIT = 5  # seconds",
    "jaxrl_post/simulate/simulation.py": "",
    "kernels/attention.py": "",
    "configs/demo.py": "import base_name\nHERE / 'policy' / name",
    "configs/policy/weights.bin": "0",
    "configs/demo/tail.py": "CONFIGS / 'demo.py'",
    "configs/other.py": "",
    "configs/sim/seer.py": "",
    "scripts/replay.py": "import numpy",
    "scripts/shows/law.py": GOOD
    + "    import replay, lab\n    record.run('-m', 'jaxrl_post.main', '--config=configs/demo/tail.py')\n"
    + "SOURCES = ('configs/sim/*.py',)\n",
    "tests/lab.py": "",
    "tests/test_lab.py": "",
}
NAMED = sorted(set(PROJECT) - {"jaxrl_post/simulate/simulation.py", "configs/other.py", "tests/test_lab.py"})


@pytest.fixture
def project(root) -> Path:
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_result_vouches_for_what_its_show_names(project):
    assert sources.closure(project, project / "scripts/shows/law.py") == NAMED


@pytest.mark.parametrize(
    "file, text, count",
    [
        ("jaxrl_post/rewards.py", "LIMIT = 6  # seconds", 1),  # reached by a dotted name in a string alone
        ("jaxrl_post/rewards.py", '"""What it costs."""\n\nLIMIT = (\n    5\n)', 0),  # words and layout
        ("configs/policy/weights.bin", "1", 1),
        ("kernels/attention.py", None, 1),  # gone
        ("jaxrl_post/simulate/simulation.py", "x = 1", 0),  # not one of its files
    ],
)
def test_a_result_is_stale_when_a_file_it_vouches_for_has_changed(project, capsys, file, text, count):
    folder, results = project / "scripts/shows", project / "results"
    (folder / "law.py").write_text(GOOD + "    'jaxrl_post.main', 'configs/demo.py'\n")
    assert show.main(["law"], folder, results) == 0
    (project / file).write_text(text) if text is not None else (project / file).unlink()
    capsys.readouterr()
    assert show.main(["--stale"], folder, results) == 0
    named = f": {file}" if count else ""
    assert (
        capsys.readouterr().out == f"law  {count} of 10 files changed since unknown with uncommitted changes{named}\n"
    )


def test_results_without_a_list_of_files_are_measured_by_commits(project, git, capsys):
    (project / "results").mkdir()
    old = {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (project / "results/law.json").write_text(json.dumps(old))
    (project / "scripts/shows/newer.py").write_text(GOOD)
    for name in ("jaxrl_post/rewards.py", "kernels/attention.py", "configs/other.py"):
        (project / name).write_text("x = 1")
    git("commit", "-qam", "two")
    (project / "jaxrl_post/simulate/simulation.py").write_text("x = 1")  # not committed: changed all the same
    assert show.main(["--stale"], project / "scripts/shows", project / "results") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"law    3 files of jaxrl_post and kernels changed in 1 commit since {old['commit'][:7]} (it lists no files)",
        "newer  never run",
    ]
    (project / "results/law.json").write_text(json.dumps({"commit": "0" * 40, "dirty": False}))
    assert show.main(["--stale"], project / "scripts/shows", project / "results") == 0
    assert capsys.readouterr().out.startswith("law    lists no files, and git does not know its commit 0000000\n")


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
