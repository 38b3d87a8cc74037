"""Hostile programs earn no reward, reach nothing outside and leave nothing behind, as root and as an ordinary user.

Judges every program of scripts/attacks/ at the levels basic and strict, under both accounts, and on a host that refuses
namespaces. The ordinary user owns packages of its interpreter. Programs that try to outlive their judge are judged at
every level, and their judge is killed too. The controls run without confinement: the same programs succeed there.

Then a run is graded while the same reward processes judge the attacks. Its rollouts and its policy have the same bytes as
those of a run without them. Needs root, to be both users, and a Python that every account may read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import hostile_programs
import killed
import trained

MINUTES = 10.0
PLAIN = 65534  # the account of an ordinary user
PACKAGES = ("markdown_it", "mdurl")  # that judging programs imports
LEVELS = ("basic", "strict")
SMALL = "steps=4 scheduler.prompts=8 scheduler.group_size=4 eval.prompts=8 reward.workers=2 reward.timeout_s=60"
ATTACKS, CONTROLS = 220, 120  # and those that must succeed without confinement
GRADER = """
import itertools, sys
sys.path.append({scripts!r})
import hostile_programs
from jaxrl_post.rewards import math

attacks = itertools.cycle(list(hostile_programs.attacks()))
context = hostile_programs.host_things()
things = context.__enter__() if {hostile} else {{}}
things.pop("reached", None)

def score(data_source, solution_str, ground_truth, extra_info):
    if {hostile}:
        attack = next(attacks)
        found, _ = hostile_programs.judged(attack, things, "auto", 0.2)
        assert found == 0, attack.name
    return math.exact(data_source, solution_str, ground_truth, extra_info)
"""


def show(record) -> None:
    kinds = [attack.kind for attack in hostile_programs.attacks()]
    for kind in ("earn", "reach", "exhaust", "outlive"):
        record.figure(f"attacks.{kind}", kinds.count(kind))
    record.figure("attacks", len(kinds), at_least=ATTACKS)
    record.figure("is_root", os.getuid() == 0, equals=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("jaxrl_post", "scripts"):
            shutil.copytree(
                record.root / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__", "results")
            )
        _own_environment(Path(folder, "plain"))
        for user in ("root", "plain"):
            for level in LEVELS:
                _attacked(record, Path(folder), user, level)
            _attacked(record, Path(folder), user, "basic", refused=True)
            for level in ("none", *LEVELS):
                _outlived(record, Path(folder), user, level)
            _outlived(record, Path(folder), user, "none", refused=True)
        _controls(record, Path(folder))
    _beside_a_run(record)


def _own_environment(folder: Path) -> None:
    """Makes a virtual environment that the ordinary user owns, with packages of its own."""
    subprocess.run([_readable_python(), "-m", "venv", "--without-pip", str(folder)], check=True, cwd="/")
    packages = next(folder.glob("lib/*/site-packages"))
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        shutil.copytree(Path(found.origin).parent, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, PLAIN, PLAIN, follow_symlinks=False)


def _found(folder: Path, user: str, level: str, *kinds: str, refused: bool = False) -> dict:
    """Returns what scripts/hostile_programs.py prints for a user and a level. `refused`: the host refuses namespaces."""
    account = {"user": PLAIN, "group": PLAIN, "extra_groups": []} if user == "plain" else {}
    python = str(folder / "plain" / "bin" / "python") if user == "plain" else sys.executable
    command = [python, "-B", str(folder / "scripts" / "hostile_programs.py"), level, *kinds]
    if refused:
        command = [python, "-B", str(folder / "scripts" / "without_namespaces.py"), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd="/", check=False, **account)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _attacked(record, folder: Path, user: str, level: str, refused: bool = False) -> None:
    found = _found(folder, user, level, refused=refused)
    key = f"{user}.{level}{'.without_namespaces' if refused else ''}"
    record.figure(f"{key}.layers", found["layers"])
    succeeded = [name for name, one in found["attacks"].items() if one["score"] != 0]
    record.figure(f"{key}.attacks", len(found["attacks"]), at_least=ATTACKS)
    record.figure(f"{key}.succeeded", succeeded, equals=[])
    record.figure(f"{key}.reached", found["reached"], equals=[])
    record.figure(f"{key}.processes_left_behind", found["left_behind"], equals=0)
    # A sleeper ends after twice its limit of 0.5 s and one second. All others end sooner.
    record.figure(f"{key}.longest_verdict_s", max(one["seconds"] for one in found["attacks"].values()), at_most=6.0)
    print(f"{key}: {len(found['attacks'])} attacks")
    for name, one in found["attacks"].items():
        print(f"  {name:50} score {one['score']:g}  {one['seconds']:6.3f} s")


def _outlived(record, folder: Path, user: str, level: str, refused: bool = False) -> None:
    """What programs leave behind that try to outlive their verdict, and their judge, which is killed."""
    found = _found(folder, user, level, "outlive", "killed", refused=refused)
    key = f"{user}.{level}{'.without_namespaces' if refused else ''}.outlive"
    record.figure(f"{key}.layers", found["layers"])
    record.figure(f"{key}.tried", len(found["outlived"]), at_least=11)
    record.figure(f"{key}.left_by_a_verdict", found["left_behind"], equals=0)
    left = {name: count for name, count in found["outlived"].items() if count}
    record.figure(f"{key}.left_by_a_killed_judge", left, equals={})


def _controls(record, folder: Path) -> None:
    """Without confinement, as an ordinary user, the attacks that reach out succeed."""
    found = _found(folder, "plain", "none", "control", "killed")
    succeeded = [name for name, one in found["attacks"].items() if one["score"] != 0]
    record.figure("controls_that_succeed_without_confinement", len(succeeded), at_least=CONTROLS)
    record.figure("controls_that_reached", found["reached"])
    outlived = sum(count > 0 for count in found["outlived"].values())
    record.figure("controls_that_outlive_without_confinement", outlived, at_least=5)


def _beside_a_run(record) -> None:
    """A run whose reward processes judge attacks too has the rollouts and the policy of a run whose do not."""
    with tempfile.TemporaryDirectory() as place:
        runs = []
        for hostile in (False, True):
            folder = Path(place, f"run_{hostile}")
            file = Path(place, f"grader_{hostile}.py")
            file.write_text(GRADER.format(scripts=str(record.root / "scripts"), hostile=hostile))
            own = f"reward.functions=('{file}:score',)"
            trained.run(record, "configs/demo.py", folder, SMALL, own, timeout_s=900)
            runs.append(folder)
        compared, different = killed.compared(*runs)
        record.figure("files_compared", compared, at_least=3)
        record.figure("files_that_differ_beside_attacks", different, equals=[])


def _readable_python() -> str:
    """Returns a Python from 3.11 that every account may run.

    Raises:
      RuntimeError: there is none.
    """
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        ask = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(ask, cwd="/", user=PLAIN, group=PLAIN, extra_groups=[]).returncode == 0:
                return python
        except OSError:
            continue
    raise RuntimeError("an ordinary user needs a Python from 3.11 that every account may run, such as /usr/bin/python3")
