"""python -m jaxrl_post tinker: its flags, and a server in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from jaxrl_post.commands import tinker

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ([], "the following arguments are required: --model"),
        (["--modle=x"], "nearest is --model"),
        (["--model=x", "--port=70000"], "--port=70000 is above 65535; the nearest valid value is 65535"),
        (["--model=x", "--queue=0"], "'0' must be a whole number of at least 1"),
        (["--model=x", "--idle=0"], "--idle=0 must be at least 1 second"),
        (["--model=x", "--key=tml-a", "--without-key"], "--key and --without-key are both given"),
        (["--model=x", "--key="], "--key is empty: give one, leave it out for a new one, or give --without-key"),
        (["--model=x", "--key=a"], "--key=a must begin with tml-"),
        (["--model=x", "--port=0"], "there is no folder or file x"),
        (["--model=x", "--host=no.such.host.invalid"], "cannot be listened at"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, flags, sentence):
    assert tinker.main(flags) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and sentence in told, told


def test_a_key_of_the_environment_that_the_sdk_refuses_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setenv(tinker.KEY, "secret")
    assert tinker.main(["--model=x"]) == 1
    told = capsys.readouterr().err
    assert "the variable TINKER_API_KEY must begin with tml-" in told and "secret" not in told
    for flag in ("--key=tml-a", "--without-key"):
        assert tinker.main(["--model=x", "--port=0", flag]) == 1 and "no folder or file x" in capsys.readouterr().err


def test_a_server_begins_says_where_and_ends_by_a_signal(tmp_path):
    command = [sys.executable, "-m", "jaxrl_post", "tinker", "--model=configs/demo_policy", "--port=0", "--name=sums"]
    command += [f"--folder={tmp_path}", "--config.engine.slots=4", "--config.engine.row_sizes=(32,)"]
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env.pop(tinker.KEY, None)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            lines = iter(process.stdout.readline, "")
            place = next(found for line in lines if (found := re.fullmatch(r"serving sums to .* at (\S+)\n", line)))
            key = re.fullmatch(r"key (tml-\S{20,})\n", next(lines))[1]
            request = urllib.request.Request(f"{place[1]}/api/v1/get_server_capabilities", headers={"X-API-Key": key})
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["supported_models"][0]["model_name"] == "sums"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, process.stderr.read()
        finally:
            process.kill()
