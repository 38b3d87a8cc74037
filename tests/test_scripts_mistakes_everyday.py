"""Cases of everyday mistakes: each is whole, and some are run here. The show no-silent-mistakes runs all."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from jaxrl_post import main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from mistakes import everyday  # noqa: E402

RUN_HERE = ("verl's rollout.n", "TRL's name in a config file", "a data file without rows", "every prompt is dropped")


def test_every_case_is_whole():
    assert len(everyday.CASES) >= 60 and max(Counter(case["name"] for case in everyday.CASES).values()) == 1
    for case in everyday.CASES:
        assert {"name", "files", "argv", "says", "code"} <= set(case) <= {*case, "before", "may_appear"}
        assert case["argv"][:2] == ["-m", "jaxrl_post.main"] and case["code"] == 1
        assert re.compile(case["says"]) and not re.search(case["says"], "error: ")
        assert all(isinstance(command, list) for command in case.get("before", []))


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_case_is_one_sentence_and_changes_nothing(name, tmp_path, monkeypatch, capsys):
    (case,) = [case for case in everyday.CASES if case["name"] == name]
    for path, text in case["files"].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main.main(case["argv"][2:]) == case["code"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and re.search(case["says"], line)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
