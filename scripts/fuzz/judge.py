"""Replies of a judge's endpoint, and files of its cache."""

from __future__ import annotations

import http.server
import json
import math
import threading
from pathlib import Path

from fuzz import mutations

REPLY = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "It is.\nVERDICT: 0.5"}}]}
VERDICT = {"verdict": 0.5}


class Cases:
    """A server on this machine sends a damaged reply to each question. Every fifth case damages the cache."""

    def __init__(self, folder: Path):
        from jaxrl_post.rewards import judge

        self._judge, self._folder, self._body, self._length = judge, folder, b"", 0
        cases = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", str(cases._length))
                self.end_headers()
                self.wfile.write(cases._body)

            def log_message(self, *given):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def valid(self) -> None:
        self._answer(json.dumps(REPLY).encode())
        self._ask(None)

    def own(self, error: BaseException) -> bool:
        text = str(error)
        return type(error) is self._judge.Undecided and "judge" in text and "\n" not in text and len(text) < 2000

    def case(self, index, random):
        if index % 5 == 0:
            self._answer(json.dumps(REPLY).encode())
            cache = self._folder / f"cache{index}"
            self._ask(str(cache))
            what, data = mutations.damaged_json(random, VERDICT)
            next(cache.rglob("*.json")).write_bytes(data)
            return f"cache: {what}", lambda: self._ask(str(cache))
        what, data = mutations.damaged_json(random, REPLY)
        self._answer(data, random.choice((0, 0, 0, -1, 5)))
        return what, lambda: self._ask(None)

    def _answer(self, body: bytes, more: int = 0) -> None:
        self._body, self._length = body, max(len(body) + more, 0)

    def _ask(self, cache: str | None) -> None:
        url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        ask = self._judge.Judge(url, model="m", question="{answer}", attempts=1, deadline_s=1.0, cache=cache)
        found = ask("source", "answer", "truth", {})
        assert isinstance(found, float) and math.isfinite(found) and 0.0 <= found <= 1.0
