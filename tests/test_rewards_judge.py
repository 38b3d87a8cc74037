"""The judge against a local endpoint: what it asks, what it takes for a verdict, when it asks again, when it gives up."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_rewards_pool import pool, scores

from jaxrl_post.rewards.judge import Judge, Undecided

QUESTION = "Task: {task} Answer: {answer} Truth: {truth}"


class Endpoint:
    """Answers from a list of (status, text of the reply), the last one for ever; keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked, self.headers, outer = list(answers), [], {}, self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append((self.path, None, self.headers.get("Authorization")))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body, self.headers.get("Authorization")))
                status, text = outer.answers[min(len(outer.asked), len(outer.answers)) - 1]
                if text is None:
                    outer.held.wait(20)
                    text = ""
                reply = text if text.startswith("{") else json.dumps({"choices": [{"message": {"content": text}}]})
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(reply.encode())

            def log_message(self, *args):
                pass

        self.held = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def close(self):
        self.held.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def serve():
    made = []

    def make(*answers):
        made.append(Endpoint(*answers))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def judge(endpoint, **changed):
    return Judge(endpoint.url, model="m", question=QUESTION, sleep=lambda seconds: None, **changed)


def ask(one, answer="4", task="2+2"):
    return one("sums", answer, "4", {"task": task})


def test_what_is_asked(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint = serve((200, "It is.\nVERDICT: 1"))
    assert ask(judge(endpoint), answer="{truth}", task="{answer}") == 1.0  # braces of what is put in are its own
    ((path, body, key),) = endpoint.asked
    assert (
        path == "/v1/chat/completions" and key == "Bearer secret" and body["temperature"] == 0 and body["model"] == "m"
    )
    assert body["messages"] == [{"role": "user", "content": "Task: {answer} Answer: {truth} Truth: 4"}]


def test_the_length_of_a_reply_is_asked_for_where_it_is_given(serve):
    endpoint = serve((200, "VERDICT: 1"))
    ask(judge(endpoint)), ask(judge(endpoint, max_tokens=7))
    assert [body.get("max_tokens") for _, body, _ in endpoint.asked] == [None, 7]
    with pytest.raises(ValueError, match="max_tokens=-1 at least 0"):
        judge(endpoint, max_tokens=-1)


def test_a_reply_that_is_cut_off_has_no_verdict(serve):
    """VERDICT: 0.25 cut after 0.2 would be another verdict."""
    told = [
        json.dumps({"choices": [{"message": {"content": f"VERDICT: {text}"}, "finish_reason": why}]})
        for text, why in (("0.2", "length"), ("0.25", "stop"))
    ]
    endpoint = serve(*((200, one) for one in told))
    assert ask(judge(endpoint)) == 0.25 and len(endpoint.asked) == 2
    with pytest.raises(Undecided, match="VERDICT: 0.2', which is cut off at max_tokens"):
        ask(judge(serve((200, told[0])), attempts=1))


@pytest.mark.parametrize(
    "text",
    [
        "VERDICT: 1 or so",
        "VERDICT: 1\nGood luck!",
        "verdict: 1",
        "1",
        "",
        "VERDICT: 7",
        "VERDICT: nan",
        '{"choices": []}',
        "{not json",
    ],
)
def test_a_reply_without_a_verdict_is_none(serve, text):
    endpoint = serve((200, text))
    with pytest.raises(Undecided, match="no verdict within 8 s and 3 attempts; the last one brought"):
        ask(judge(endpoint))
    assert len(endpoint.asked) == 3


def test_what_passes_is_asked_again_and_what_does_not_is_not(serve):
    endpoint = serve((503, "busy"), (200, "hm"), (200, "VERDICT: 0.5"))
    assert ask(judge(endpoint)) == 0.5 and len(endpoint.asked) == 3
    refused = serve((401, "no"), (200, "VERDICT: 1"))
    with pytest.raises(Undecided, match="HTTP 401"):
        ask(judge(refused))
    assert len(refused.asked) == 1


def test_a_deadline_holds_for_all_attempts(serve):
    endpoint = serve((200, None))
    with pytest.raises(Undecided, match="no verdict within 0.2 s.*timed out"):
        ask(judge(endpoint, deadline_s=0.2))
    assert len(endpoint.asked) == 1


def test_an_endpoint_that_is_not_there(serve):
    endpoint = serve((200, "VERDICT: 1"))
    one = judge(endpoint)
    endpoint.server.server_close()
    pauses = []
    one._sleep = pauses.append
    with pytest.raises(Undecided, match="Connection"):
        ask(one)
    assert pauses == [0.2, 0.4]


def test_a_cache_answers_for_the_same_question_only(serve, tmp_path):
    endpoint = serve((200, "VERDICT: 1"), (200, "VERDICT: 0"))
    assert ask(judge(endpoint, cache=str(tmp_path))) == 1.0
    assert ask(judge(endpoint, cache=str(tmp_path))) == 1.0 and len(endpoint.asked) == 1
    assert ask(judge(endpoint, cache=str(tmp_path)), answer="5") == 0.0 and len(endpoint.asked) == 2
    assert len(list(tmp_path.rglob("*.json"))) == 2 == len([path for path in tmp_path.rglob("*") if path.is_file()])


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"endpoint": "localhost:8000"}, "must begin with http"),
        ({"attempts": 0}, "attempts=0 must be at least 1"),
        ({"question": "{task}?"}, "does not say where {answer} goes"),
        ({"low": 1.0}, "low=1.0 below high=1.0"),
        ({"deadline_s": float("inf")}, "deadline_s=inf above 0 and finite"),
        ({"cache": __file__}, "must be a folder, and it is a file"),
        ({"cache": "gs://bucket/verdicts"}, "must be a local folder, and it is a URL"),
        ({"key_variable": "PATH"}, "'http://x' would carry the key of PATH unencrypted; use https://"),
    ],
)
def test_what_is_refused(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        Judge(**{"endpoint": "http://x", "model": "m", "question": QUESTION} | changed)


def test_a_row_without_the_task_that_is_asked_for_is_refused(serve):
    endpoint = serve((200, "VERDICT: 1"))
    with pytest.raises(ValueError, match='holds {task}, and extra_info has no "task" but ..level..'):
        judge(endpoint)("sums", "4", "4", {"level": 1})
    assert judge_without_task(endpoint)("sums", "4", "4", {}) == 1.0 and len(endpoint.asked) == 1


def judge_without_task(endpoint):
    return Judge(endpoint.url, model="m", question="{answer} for {truth}?")


def test_a_dead_endpoint_masks_samples_and_is_counted(tmp_path, caplog):
    file = tmp_path / "judged.py"
    file.write_text(
        "from jaxrl_post.rewards.judge import Judge\n"
        "score = Judge('http://127.0.0.1:9/v1', model='m', question='{answer}', deadline_s=0.5, attempts=2)\n"
    )
    with pool(str(file), "score", workers=1, timeout_s=5.0) as rewards:
        group, told = scores(rewards, "4", "4"), rewards.metrics()
    assert not group.scored.any() and told["reward/unscored"] == 2 and "no verdict within 0.5 s" in caplog.text


def test_the_key_never_follows_a_redirect(serve, monkeypatch):
    """Neither within POST (307) nor as a GET (302). The other server sees nothing at all."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    other = serve((200, "VERDICT: 1"))
    for status in (301, 302, 303, 307, 308):
        endpoint = serve((status, "moved"))
        endpoint.headers["Location"] = f"{other.url}/chat/completions"
        with pytest.raises(Undecided, match=f"HTTP {status}, a redirect to 'http://127.0.0.1"):
            ask(judge(endpoint))
        assert len(endpoint.asked) == 1 and other.asked == []


def test_a_key_goes_unencrypted_to_this_host_alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for url in ("http://localhost:1", "http://127.0.0.2", "http://[::1]:80/v1", "https://judge.example"):
        Judge(url, model="m", question=QUESTION)
    for url in (
        "http://judge.example",
        "http://localhost.example",
        "http://127.0.0.1@judge.example/v1",
        "http://10.0.0.1",
    ):
        with pytest.raises(ValueError, match="would carry the key of OPENAI_API_KEY unencrypted"):
            Judge(url, model="m", question=QUESTION)
        Judge(url, model="m", question=QUESTION, key_variable="")


@pytest.fixture
def drip():
    """A server that sends `parts` to every caller, one every 20 ms, until the caller leaves."""
    servers = []

    def make(*parts):
        server, left = socket.create_server(("127.0.0.1", 0)), threading.Event()
        servers.append(server)

        def run():
            with contextlib.suppress(OSError):
                caller, _ = server.accept()
                with caller:
                    for part in parts:
                        caller.sendall(part)
                        time.sleep(0.02)
            left.set()

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}/v1", left

    yield make
    for server in servers:
        server.close()


OK = b"HTTP/1.1 200 OK\r\n"
DRIPS = {
    "status": [b"H"] * 200,
    "headers": [OK, *[b"A: b\r\n"] * 90, *[b" "] * 200],
    "body": [OK + b"\r\n", *[b" "] * 200],
    "known length": [OK + b"Content-Length: 999\r\n\r\n", *[b" "] * 200],
}


@pytest.mark.parametrize("parts", DRIPS.values(), ids=DRIPS)
def test_dripping_bytes_cannot_outlast_the_deadline(drip, parts):
    url, left = drip(*parts)
    begun = time.monotonic()
    with pytest.raises(Undecided, match=r"no verdict within 0.15 s.*timed out"):
        ask(Judge(url, model="m", question=QUESTION, deadline_s=0.15))
    assert time.monotonic() - begun < 0.15 + 0.6  # the rest is a loaded machine's; the drip lasts 4 s
    assert left.wait(2.0)  # the connection is shut down too


def test_a_slow_name_lookup_counts(serve, monkeypatch):
    endpoint, found = serve((200, "VERDICT: 1")), threading.Event()
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: found.wait(10) and real(*given, **named))
    begun = time.monotonic()
    with pytest.raises(Undecided, match="timed out"):
        ask(judge(endpoint, deadline_s=0.15))
    assert time.monotonic() - begun < 2.0
    found.set()


@pytest.mark.parametrize(
    "held",
    [
        '{"verdict": 7}',
        '{"verdict": NaN}',
        '{"verdict": true}',
        '{"verdict": "1"}',
        "{}",
        "[1]",
        "",
        "\udcff",
        "[" * 9999,
    ],
)
def test_a_damaged_cache_file_is_asked_for_anew(serve, tmp_path, caplog, held):
    endpoint = serve((200, "VERDICT: 1"))
    ask(judge(endpoint, cache=str(tmp_path)))
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(held.encode(errors="surrogateescape"))
    assert ask(judge(endpoint, cache=str(tmp_path))) == 1.0 and len(endpoint.asked) == 2
    assert "holds no verdict from 0 to 1 and is asked for anew" in caplog.text
    assert ask(judge(endpoint, cache=str(tmp_path))) == 1.0 and len(endpoint.asked) == 2  # mended


def test_a_cache_that_cannot_be_written_costs_no_verdict(serve, tmp_path, caplog):
    endpoint, one = serve((200, "VERDICT: 1")), None
    one = judge(endpoint, cache=str(tmp_path / "cache"))
    (tmp_path / "cache").write_text("in the way")
    assert ask(one) == 1.0 and "the verdict could not be kept" in caplog.text


def test_a_verdict_that_cannot_be_renamed_leaves_nothing_in_the_cache(serve, tmp_path, caplog, monkeypatch):
    def fails(part, file):
        raise OSError(116, "Stale file handle", str(part), None, str(file))

    one = judge(serve((200, "VERDICT: 1")), cache=str(tmp_path))
    monkeypatch.setattr(Path, "replace", fails)
    assert ask(one) == 1.0 and "the verdict could not be kept" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("text", ["{" * 3000, '{"a": ' + "1" * 5000 + "}", "{\x00", "VERDICT: " + "9" * 400])
def test_replies_that_break_a_parser_are_no_verdict(serve, text):
    endpoint = serve((200, text))
    with pytest.raises(Undecided, match="no verdict within"):
        ask(judge(endpoint, attempts=1))
