"""The files of a step among several processes: each is hashed by its writer, and read by one of all at a resume."""

import json
import os

import jax
import pytest

from jaxrl_post.runs.checkpoint import signed_files

KEY = bytes(32)
NAMES = (
    "about.json",
    "arrays/manifest.ocdbt",
    "arrays/d/abc",
    "arrays/ocdbt.process_0/d/big",
    "arrays/ocdbt.process_1/d/big",
    "arrays/ocdbt.process_1/manifest.ocdbt",
    "arrays/ocdbt.process_7/d/of_a_process_that_there_is_not",
    "host/process_0/state.json",
    "host/process_1/state.json",
)


@pytest.fixture
def step(tmp_path):
    folder = tmp_path / "step_000003"
    for size, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(range(size + 1)))
    return folder


def test_each_file_is_hashed_by_the_process_that_wrote_it(step, monkeypatch):
    alone = signed_files.manifest(step, 3, KEY)
    assert set(alone["files"]) == set(NAMES)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    own = [signed_files.hashed(step, process) for process in range(2)]
    assert sorted(own[1]) == [name for name in sorted(NAMES) if "process_1" in name]
    assert not set(own[0]) & set(own[1]) and set(own[0]) | set(own[1]) == set(NAMES)
    (step / f"{signed_files.HASHES}1").write_text(json.dumps(own[1]))
    assert signed_files.manifest(step, 3, KEY, own[0]) == alone
    assert not list(step.glob(f"{signed_files.HASHES}*"))


def test_processes_share_the_reading_and_miss_nothing(step):
    (step / signed_files.MANIFEST).write_text(json.dumps(signed_files.manifest(step, 3, KEY)))
    shares = [(number, 3) for number in range(3)]
    assert [signed_files.damage(step, KEY, share=share) for share in shares] == ["", "", ""]
    for name in NAMES:
        before = (step / name).read_bytes()
        (step / name).write_bytes(before[:-1] + b"x")
        found = [signed_files.damage(step, KEY, share=share) for share in shares]
        assert sorted(found) == ["", "", f"the bytes of {name} are not those that were written"]
        os.truncate(step / name, len(before) - 1)
        assert all("instead of" in signed_files.damage(step, KEY, share=share) for share in shares)
        (step / name).write_bytes(before)
