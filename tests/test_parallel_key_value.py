"""The key-value store of a coordinator, in a process that has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BOARD = """
import socket

import jax
from jax._src import distributed

from jaxrl_post.parallel.exchange import Board

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
board, others = Board("run/0"), Board("run/01")
text = "".join(map(str, range(600_000)))  # longer than one message of gRPC may be
board.put("1/2", text)
board.put("1/3", "")
board.put("12", "kept")
others.put("1/2", "kept")
assert len(text) > 3 << 20 and board.get("1/2", 5.0) == text and board.get("1/3", 5.0) == ""
board.remove("1")
there = [name for name, _ in distributed.global_state.client.key_value_dir_get("jaxrl_post")]
assert sorted(there) == [f"jaxrl_post/run/{name}/0" for name in ("0/12", "01/1/2")], there
try:
    board.get("1/2", 0.2)
except TimeoutError as error:
    assert "run/0/1/2: not there after 0.2 s" in str(error)
assert board.meet("over", 5.0)
"""


def test_texts_of_any_length_are_shared_and_removed():
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", BOARD], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
