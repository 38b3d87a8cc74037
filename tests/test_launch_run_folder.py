"""Run folders are numbered, and never written over."""

import pytest

from jaxrl_post.runs.run_folder import first_missing, make, own, recorded, remove


def test_numbers_go_on(tmp_path):
    parent = str(tmp_path / "runs")
    first, second = make("", parent, "demo", 3).place, make("", parent, "demo", 3).place
    assert (first.name, second.name) == ("demo-3-001", "demo-3-002")
    (tmp_path / "runs" / "demo-3-041").mkdir()
    (tmp_path / "runs" / "demo-3-extra").mkdir()
    assert make("", parent, "demo", 3).place.name == "demo-3-042"
    assert make("", parent, "demo", 31).place.name == "demo-31-001"
    assert own(first) == first


def test_an_exact_folder_must_be_new_or_empty(tmp_path):
    folder = tmp_path / "mine"
    assert make(str(folder), "runs", "demo", 0) == (folder, True) == make(str(folder), "runs", "demo", 0)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="mine exists already and is not an empty folder: a run is never written over"):
        make(str(folder), "runs", "demo", 0)
    assert (folder / "config.json").read_text() == "{}"
    with pytest.raises(ValueError, match="exists already"):
        make(str(folder / "config.json"), "runs", "demo", 0)


def test_what_a_run_recorded_of_options_that_depend_on_the_platform(tmp_path):
    file = tmp_path / "config.json"
    assert recorded(str(tmp_path)) == {}
    file.write_text(
        '{"steps": 3, "engine": {"slots": 4, "page_size": 16, "dtype": "float32"}, "model": {"preset": ""}}'
    )
    assert recorded(str(tmp_path)) == {"engine": {"page_size": 16, "dtype": "float32"}}
    file.write_text('{"steps": 3')
    with pytest.raises(ValueError, match="config.json cannot be read"):
        recorded(str(tmp_path))


def test_a_run_that_could_not_start_leaves_nothing_that_it_made(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    since = first_missing(there / "a" / "runs")
    assert since == there / "a" and first_missing(there) is None
    place, _ = make("", str(there / "a" / "runs"), "demo", 0)
    remove(place, since)
    assert list(there.iterdir()) == []
    first, second = (make("", str(there / "runs"), "demo", 0).place for _ in range(2))
    remove(second, there / "runs")
    assert list((there / "runs").iterdir()) == [first]  # another run has begun there
    remove(first, None)
    assert (there / "runs").is_dir()  # it was there before
