"""python -m jaxrl_post serve: its flags, and a server in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from jaxrl_post.commands import serve

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--model=x", "--token="], "--token is empty: give one, leave it out for a new one, or give --without-token"),
        ([], "say what is served: --model=POLICY or --run=RUN"),
        (["--modle=x"], "nearest is --model"),
        (["--model=x", "--port=70000"], "--port=70000 is above 65535; the nearest valid value is 65535"),
        (["--model=x", "--queue=-1"], "'-1' must be a whole number of at least 0"),
        (["--model=x", "--timeout=0"], "--timeout=0 must be at least 0.001 seconds"),
        (["--model=x", "--every=0"], "--every=0 must be at least 0.1 seconds"),
        (["--model=x", "--token=a", "--without-token"], "--token and --without-token are both given"),
        (["--model=x", "--tool-calls=openai"], "invalid choice: 'openai'"),
        (["--model=x", "--port=0"], "there is no folder or file x"),
        (["--run=x", "--port=0"], "x is no folder of a run"),
        (
            ["--model=x", "--port=0", "--config.steps=3"],
            "the option 'steps=3' changes nothing here; a policy reads those",
        ),
        (["--run=x", "--port=0", "--config.optimizer.lr=1"], "'optimizer.lr=1' changes nothing here"),
        (["--model=x", "--port=0", "--config.engin.slots=3"], "there is no folder or file x"),
        (["--run=gs://a/b"], "--run"),
        (["--model=x", "--host=no.such.host.invalid"], "cannot be listened at"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, flags, sentence):
    assert serve.main(flags) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and sentence in told, told


def test_a_port_that_is_taken_is_said_before_anything_is_compiled(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve.main(["--model=configs/demo_policy", f"--port={taken.getsockname()[1]}"]) == 1
    assert "cannot be listened at: Address already in use" in capsys.readouterr().err


def test_a_server_begins_says_where_and_ends_by_a_signal():
    command = [sys.executable, "-m", "jaxrl_post", "serve", "--model=configs/demo_policy", "--port=0", "--name=sums"]
    command += ["--config.engine.slots=4", "--config.engine.row_sizes=(32,)"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        try:
            lines = iter(process.stdout.readline, "")
            place = next(
                found for line in lines if (found := re.fullmatch(r"serving sums, version 0, at (\S+)\n", line))
            )
            token = re.fullmatch(r"token (\S{20,})\n", next(lines))[1]
            body = json.dumps({"model": "sums", "prompt": "1+2=", "seed": 1}).encode()
            request = urllib.request.Request(f"{place[1]}/completions", body, {"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["seed"] == 1
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, process.stderr.read()
        finally:
            process.kill()


def _environment():
    return {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
