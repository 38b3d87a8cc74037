"""What the server refuses, in OpenAI's error form: one sentence, and the field that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_post.json_text import shown

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refusal(Exception):
    """A request that is not served.

    Attributes:
      status: of HTTP. sentence: what is wrong, with the nearest valid choice. param: the field of the body, or None.
      headers: of the response.
    """

    def __init__(self, status: int, sentence: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(sentence)
        self.status, self.sentence, self.param, self.headers = status, sentence, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Returns the body of the response."""
        return error(self.status, self.sentence, self.param)


def error(status: int, sentence: str, param: str | None = None) -> dict[str, Any]:
    """Returns a body in OpenAI's error form."""
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": sentence, "type": kind, "param": param, "code": status}}


def wrong(name: str, value: Any, must: str, near: str = "") -> Refusal:
    """Returns the refusal of a field's value. `must`: what it must be. `near`: the nearest valid value."""
    nearest = f"; the nearest valid value is {near}" if near else ""
    return Refusal(400, f"{name}={shown(value)} must be {must}{nearest}", name)
