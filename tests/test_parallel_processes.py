"""Start-up from the environment, and two real processes that share scores bit for bit."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.parallel.exchange import broadcast_array, broadcast_text
from jaxrl_post.parallel.processes import start

PROGRAM = """
import os, time, numpy as np
from jaxrl_post.parallel import exchange
from jaxrl_post.parallel.processes import start
start(os.environ)
import jax
me = jax.process_index()
got = exchange.broadcast_array(np.array([[1 / 3, np.pi * 1e300], [np.nan, -0.0]]) + me)
every = exchange.gather(f"of {me}".encode())
assert every == ([b"of 0", b"of 1"] if me == 0 else []), every
assert [exchange.first_text(text) for text in ("second" * me, f"{me}", "")] == ["second", "0", ""]
time.sleep(me)
came = time.time()
exchange.meet(60)
waited = time.time() - came
assert waited > 0.5 if me == 0 else waited < 0.5, waited
named = exchange.broadcast_text("" if me else "run-007")
last = exchange.broadcast_array(np.array([True, False]) ^ bool(me)).tolist()
exchange.meet(60)
left = [name for name, _ in exchange.distributed.global_state.client.key_value_dir_get_bytes("jaxrl_post")]
assert left == ["jaxrl_post/broadcast/5/0"], left  # what all have read is freed
refused = ""
try:
    if me == 0: exchange.meet(0.5)  # the other one never comes
except TimeoutError as error:
    refused = str(error)
assert refused == ("not all processes of the job have compiled their programs within 0.5 s" if me == 0 else "")
print("GOT", jax.process_count(), len(jax.devices()), got.dtype, got.tobytes().hex(), named, last)
"""


def test_alone_without_the_variables():
    start({})
    x = np.array([1 / 3])
    assert broadcast_array(x) is x and broadcast_text("a b") == "a b"


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES set but JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID not"),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "'two' must be a whole number",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID=2 must be at least 0 and below JAX_NUM_PROCESSES=2",
        ),
    ],
)
def test_half_an_environment_is_one_sentence(environment, sentence):
    with pytest.raises(ValueError, match=sentence):
        start(environment)


def test_two_processes_share_every_bit():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = str(Path(__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=os.environ
            | {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(i),
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": root,
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    lines = [[line for line in out.splitlines() if line.startswith("GOT")] for out, _ in outputs]
    assert [len(found) for found in lines] == [1, 1], outputs
    assert lines[0] == lines[1]
    want = np.array([[1 / 3, np.pi * 1e300], [np.nan, -0.0]]) + 0
    assert lines[0][0] == f"GOT 2 4 float64 {want.tobytes().hex()} run-007 [True, False]"
