"""Files as they are written: a full device is /dev/full, whose every write fails as on a full disk."""

from __future__ import annotations

import errno
import os

import pytest

from jaxrl_post.ring import written

FULL = "/dev/full"


def test_a_log_names_its_file_where_the_disk_is_full_and_closes():
    with written.Log(FULL) as log, pytest.raises(OSError, match=rf"No space left on device: '{FULL}'") as raised:
        log.write("a line\n")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, FULL)


def test_a_log_is_on_disk_after_each_write(tmp_path):
    file = tmp_path / "log"
    file.write_text("before\n")
    with written.Log(file) as log:
        log.write("ä\n")
        assert file.read_text("utf-8") == "before\nä\n"
    with written.Log(file, "w") as log:
        log.write("new\n")
    assert file.read_text() == "new\n"


def test_a_short_write_is_continued(tmp_path):
    """As a nearly full disk takes a part: here at most three bytes at once."""
    log = written.Log(tmp_path / "log")
    whole = log._file

    class Short:
        def write(self, data):
            return whole.write(data[:3])

    log._file = Short()
    log.write("ten letters and more\n")
    whole.close()
    assert (tmp_path / "log").read_text() == "ten letters and more\n"


@pytest.mark.parametrize("reason", [errno.EIO, errno.EXDEV, errno.ESTALE, errno.EBUSY, errno.EPERM])
def test_a_rename_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, reason):
    def fails(one, two):
        raise OSError(reason, os.strerror(reason), str(one), None, str(two))

    file = tmp_path / "config.json"
    written.whole(file, "old")
    monkeypatch.setattr(written.os, "replace", fails)
    with pytest.raises(OSError, match=rf"{os.strerror(reason)}.*config\.json"):
        written.whole(file, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"] and file.read_text() == "old"


def test_a_name_that_the_system_gave_is_kept(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, written.naming("another"):
        (tmp_path / "none").read_text()
    assert raised.value.filename == str(tmp_path / "none")
    with pytest.raises(OSError, match="without a number"), written.naming("another"):
        raise OSError("without a number")
