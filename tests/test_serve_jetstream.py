"""JetStream's interface, orchestrator and server over the row engine, where google-jetstream 0.2.2 is installed.

The show `jetstream` lays it into a folder below .cache/peers/. Where that folder is, an extended test runs this file with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engine_lab as lab
import numpy as np
import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post.data import tokenizer
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling
from jaxrl_post.serve import jetstream_package

ROOT = Path(__file__).resolve().parents[1]
LAID = ROOT / ".cache" / "peers" / f"jetstream-{sys.version_info.major}.{sys.version_info.minor}"
MISSING = jetstream_package.missing()
needs_jetstream = pytest.mark.skipif(bool(MISSING), reason=MISSING or "it is there")
LAW = Sampling(temperature=0.0, eos_ids=(lab.EOS,))
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "  # with <eos> and <unk> 39 of the 40 ids


@pytest.mark.skipif(not MISSING, reason="google-jetstream is installed")
def test_without_jetstream_the_command_says_what_to_install(capsys):
    assert commands.main(["jetstream", "--policy=configs/demo_policy"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(
        "error: jetstream: google-jetstream is not installed; write pip install 'jaxrl_post[jetstream]'"
    )


def test_flags_of_the_command_are_checked(capsys):
    assert commands.main(["jetstream", "--policy=x", "--port=65536"]) == 1
    assert "--port=65536 is above 65535" in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.skipif(not (MISSING and LAID.is_dir()), reason=f"needless, or {LAID} is not there; see the show jetstream")
def test_this_file_with_jetstream_laid_beside():
    path = os.pathsep.join([str(ROOT), str(LAID)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


@pytest.fixture(scope="module")
def jetstream():
    from jaxrl_post.serve import jetstream

    return jetstream


@pytest.fixture(scope="module")
def engine(jetstream):
    return jetstream.Engine(lab.engine(), tokenizer.characters(LETTERS), LAW)


@needs_jetstream
def test_the_import_leaves_nothing_behind(jetstream):
    import jax

    assert logging.getLogger().level != logging.DEBUG and not hasattr(jax, "tree_map")
    assert {name: sys.modules[name] for name in ("seqio", "tiktoken") if name in sys.modules} == {}


@needs_jetstream
def test_texts_of_single_tokens_join_to_the_whole(jetstream):
    words = tokenizer.characters(LETTERS)
    theirs = jetstream.JetStreamTokenizer(words, (0,))
    ids = words.encode("row by row 12")
    assert "".join(theirs.decode([one]) for one in ids) == "row by row 12"
    padded, length = theirs.encode("row by row 12", is_bos=True, max_prefill_length=16, jax_padding=False)
    assert padded[:length].tolist() == ids and set(padded[length:].tolist()) == {-1}
    assert theirs.stop_tokens == {0, -1} and theirs.bos_id == -1


@needs_jetstream
def test_a_byte_stays_a_byte_for_jetstream_to_join(jetstream):
    pieces = tuple(f"<0x{byte:02X}>".encode() for byte in range(256))
    words = tokenizer.Llama2cTokenizer(pieces=(b"<unk>", b"<s>", b"</s>", *pieces), scores=(0.0,) * 259, ids={})
    theirs = jetstream.JetStreamTokenizer(words, (1, 2))
    ids = [byte + 3 for byte in "é\n".encode()]
    assert jetstream.package.token_utils.text_tokens_to_str([theirs.decode([one]) for one in ids]) == "é\n"


@contextlib.contextmanager
def served(jetstream, engine):
    """Yields a stub and the messages of a server in this process."""
    import grpc
    from jetstream.core.proto import jetstream_pb2 as pb2
    from jetstream.core.proto import jetstream_pb2_grpc as pb2_grpc

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = jetstream.serve(engine, "127.0.0.1", port)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield pb2_grpc.OrchestratorStub(channel), pb2
    finally:
        end(server)


def end(server) -> None:
    """Ends a server. JetStream's own `stop` takes the marks back that end its threads, and may do so forever."""
    driver = server._driver
    driver.live = False
    one_each = [*driver._transfer_backlogs, *driver._generate_backlogs.values(), *driver._detokenize_backlogs]
    while any(thread.is_alive() for thread in driver._all_threads):
        for backlog in (driver._prefill_backlog, *one_each):
            with contextlib.suppress(queue.Full):
                backlog.put_nowait(None)
        time.sleep(0.02)
    asyncio.run_coroutine_threadsafe(server._async_stop(), server._loop).result(60)
    server._loop.call_soon_threadsafe(server._loop.stop)
    server._loop_thread.join(60)


def directly(given: list[list[int]]) -> list[list[int]]:
    asked = [
        Request(
            rollout_id=(name := RolloutId(0, "train", 0, str(place), 0)),
            prompt=Prompt(id=str(place), tokens=tokens),
            seed=name.seed(),
            max_tokens=lab.BASE["max_length"] - len(tokens),
            sampling=LAW,
        )
        for place, tokens in enumerate(given)
    ]
    found = lab.run(lab.engine(steps_per_dispatch=3), asked)
    return [found[one.rollout_id].tokens.tolist() for one in asked]


@needs_jetstream
def test_the_orchestrator_gives_the_engines_tokens_and_refuses_in_a_sentence(jetstream, engine):
    import grpc

    noise = np.random.default_rng(0)
    given = [noise.integers(4, 38, noise.integers(1, 50)).tolist() for _ in range(24)]
    limits = noise.integers(1, 40, len(given)).tolist()
    cut = [tokens[:limit] for tokens, limit in zip(directly(given), limits)]
    wanted = [tokens[:-1] if tokens[-1] == lab.EOS else tokens for tokens in cut]  # JetStream sends no end
    with served(jetstream, engine) as (stub, pb2):

        def decode(limit, **content):
            parts = stub.Decode(pb2.DecodeRequest(max_tokens=limit, **content), timeout=120)
            return [token for part in parts for one in part.stream_content.samples for token in one.token_ids]

        def ids(tokens):
            return {"token_content": pb2.DecodeRequest.TokenContent(token_ids=tokens)}

        with ThreadPoolExecutor(len(given)) as pool:
            found = list(pool.map(lambda tokens, limit: decode(limit, **ids(tokens)), given, limits))
        assert found == wanted
        text = tokenizer.characters(LETTERS).decode(given[0])
        assert decode(limits[0], text_content=pb2.DecodeRequest.TextContent(text=text)) == wanted[0]
        for limit, content, why in (
            (4, ids([5] * 96), "96 tokens; the nearest valid number is 95"),
            (4, ids([5, 40]), "token 40, outside 0..39"),
            (4, ids([5, -1]), "token -1, outside 0..39"),
            (4, ids([]), "the prompt is empty"),
            (0, ids([5]), "max_tokens=0; the nearest valid number is 1"),
            (4, ids([5]) | {"session_cache": "one"}, "session_cache names a session"),
            (4, {}, "neither text_content nor token_content"),
            (4, {"text_content": pb2.DecodeRequest.TextContent(text="row!")}, "no token for '!'"),
        ):
            with pytest.raises(grpc.RpcError, match=why) as caught:
                decode(limit, **content)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert decode(limits[1], **ids(given[1])) == wanted[1]


class Slow(queue.Queue):
    """A queue that is slow to say that it is empty, so that requests end between two looks at the free slots."""

    def get(self, block=True, timeout=None):
        try:
            return super().get(block, timeout)
        except queue.Empty:
            time.sleep(0.02)
            raise


@needs_jetstream
def test_the_server_outlives_requests_that_end_between_two_looks(jetstream, engine, monkeypatch):
    """JetStream's generating thread asserts that this never happens, and would kill this process."""
    begun, loop = [], jetstream._begun_again
    names = types.SimpleNamespace(Queue=Slow, Empty=queue.Empty, Full=queue.Full)
    monkeypatch.setattr(jetstream.package.orchestrator, "queue", names)
    monkeypatch.setattr(
        jetstream, "_begun_again", lambda work: loop(lambda: (begun.append(work.func.__name__), work()))
    )
    (wanted,) = directly([[5, 6, 7]])
    with served(jetstream, engine) as (stub, pb2):
        for limit in range(1, 9):
            content = pb2.DecodeRequest.TokenContent(token_ids=[5, 6, 7])
            parts = stub.Decode(pb2.DecodeRequest(max_tokens=limit, token_content=content), timeout=120)
            assert [t for part in parts for one in part.stream_content.samples for t in one.token_ids] == wanted[:limit]
    assert set(begun) == {"_prefill_thread", "_transfer_thread", "_generate_thread", "_detokenize_thread"}
    assert begun.count("_generate_thread") > 1 == begun.count("_detokenize_thread")


@needs_jetstream
def test_any_other_assertion_is_an_error(jetstream):
    def work():
        raise AssertionError("another one")

    with pytest.raises(AssertionError, match="another one"):
        jetstream._begun_again(work)
