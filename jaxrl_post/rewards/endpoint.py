"""One request to an HTTP endpoint, within a deadline that nothing outlasts.

The request runs in a thread of its own, because a name lookup cannot be interrupted and a socket's timeout begins anew
with every byte. At the deadline its connections are shut down and the caller goes on.

- Redirects are refused, so that the key never goes to another address.
- A host that is this one is reached without the proxies of the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

_LARGEST_REPLY = 1 << 20  # bytes
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP errors that may pass


class Refused(Exception):
    """There is no reply. `may_pass`: whether another attempt may bring one."""

    def __init__(self, said: str, may_pass: bool = True):
        super().__init__(said)
        self.may_pass = may_pass


def check(url: str, key_name: str) -> None:
    """Refuses an endpoint that is no web address, or that would carry a key in the clear.

    Args:
      key_name: the environment variable of the key; empty where no key is sent.

    Raises:
      ValueError: one sentence.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"judge: endpoint {url!r} must begin with http:// or https:// and name a host")
    if key_name and parts.scheme == "http" and not is_here(parts.hostname):
        raise ValueError(
            f"judge: endpoint {url!r} would carry the key of {key_name} unencrypted; use https://, or send no key with "
            "key_variable=''"
        )


def is_here(host: str) -> bool:
    """Returns whether a host's name or address is this host's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reply(url: str, body: bytes, key: str, left_s: float) -> object:
    """Sends `body` and returns the JSON that comes back.

    Raises:
      Refused: no reply within `left_s` seconds, an HTTP error, a redirect, or no JSON.
    """
    request = _Request(url, body, key, left_s)
    request.thread.start()
    request.thread.join(left_s)
    if request.thread.is_alive():
        request.cut()
        raise Refused(f"timed out after {left_s:.3g} s")
    if request.refused is not None:
        raise request.refused
    return request.found


class _Request:
    """A request, its thread, and what came of it: `found` or `refused`."""

    def __init__(self, url: str, body: bytes, key: str, left_s: float):
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._request, self._left_s = urllib.request.Request(url, body, headers), left_s
        self._lines = _Lines()
        here = is_here(urllib.parse.urlsplit(url).hostname or "")
        handlers = [_Http(self._lines), _Https(self._lines), _NoRedirects()]
        self._opener = urllib.request.build_opener(*handlers, *([urllib.request.ProxyHandler({})] if here else []))
        self.found: object = None
        self.refused: Refused | None = None
        self.thread = threading.Thread(target=self._ask, daemon=True)

    def cut(self) -> None:
        """Shuts the connections down, which ends the thread unless it waits for a name."""
        self._lines.cut()

    def _ask(self) -> None:
        try:
            with self._opener.open(self._request, timeout=self._left_s) as answer:
                self.found = json.loads(answer.read(_LARGEST_REPLY))
        except urllib.error.HTTPError as error:
            with error:
                self.refused = _refusal(error)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            self.refused = Refused(f"{type(error).__name__}: {error}"[:300])


def _refusal(error: urllib.error.HTTPError) -> Refused:
    if 300 <= error.code < 400:
        place = str(error.headers.get("Location", ""))[:200]
        return Refused(f"HTTP {error.code}, a redirect to {place!r}, which is not followed: name that endpoint", False)
    return Refused(f"HTTP {error.code}", error.code in _PASSING)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given):
        return None


class _Lines:
    """The connections of one request, kept so that they can be shut down from another thread."""

    def __init__(self):
        self._connections: list[http.client.HTTPConnection] = []
        self._sockets: list[socket.socket] = []  # a connection forgets its socket when the body begins
        self._late = False

    def cut(self) -> None:
        self._late = True
        for line in (*self._sockets, *(connection.sock for connection in self._connections)):
            if line is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    line.shutdown(socket.SHUT_RDWR)

    def keeping(self, kind: type) -> Callable[..., http.client.HTTPConnection]:
        """Returns a maker of connections of this kind that are kept here."""

        def make(*given, **named):
            connection = kind(*given, **named)
            connect = connection.connect

            def kept():
                connect()
                self._sockets.append(connection.sock)
                if self._late:
                    raise TimeoutError("connected after the deadline")

            connection.connect = kept
            self._connections.append(connection)
            return connection

        return make


class _Http(urllib.request.HTTPHandler):
    def __init__(self, lines: _Lines):
        super().__init__()
        self._lines = lines

    def http_open(self, request):
        return self.do_open(self._lines.keeping(http.client.HTTPConnection), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, lines: _Lines):
        super().__init__()
        self._lines = lines

    def https_open(self, request):
        return self.do_open(self._lines.keeping(http.client.HTTPSConnection), request)
