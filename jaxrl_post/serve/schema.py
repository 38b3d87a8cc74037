"""Bodies of requests: one schema for every server here, in pydantic's models, and one sentence for what is wrong.

A refusal has OpenAI's error form: the sentence, and the field that it is about.

Invariant: a field that is null counts as left out, at every level and for every name. An unknown name, and a value
that is not served, are refused. Every number has bounds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import LEAST_OF_LAW

ERROR_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
MOST_SAMPLES, MOST_STOPS, LONGEST_STOP = 1024, 16, 1024
POSITIONS, LARGEST = 1 << 24, (1 << 63) - 1
_ALIKE = 0.7  # of two names, from which on one is taken for a slip of the other
_LONG = 240  # characters of a list of names
Read = TypeVar("Read", bound="Body")
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "string_too_long": "a shorter text",
    "list_type": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "an object",
    "model_type": "an object",
}
_HOTTEST = 100.0
Text = Annotated[str, Field(max_length=1 << 20)]


class Refusal(Exception):
    """A request that is not served. What a docstring names as refused raises it.

    Attributes:
      status: of HTTP. sentence: what is wrong, with the nearest valid choice. param: the field of the body, or None.
      headers: of the response.
    """

    def __init__(
        self, sentence: str, param: str | None = None, *, status: int = 400, headers: Mapping[str, str] | None = None
    ):
        super().__init__(sentence)
        self.status, self.sentence, self.param, self.headers = status, sentence, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Returns the body of the response."""
        return error(self.status, self.sentence, self.param)


def error(status: int, sentence: str, param: str | None = None) -> dict[str, Any]:
    """Returns a body in OpenAI's error form."""
    kind = ERROR_KINDS.get(status, "invalid_request_error")
    return {"error": {"message": sentence, "type": kind, "param": param, "code": status}}


def wrong(name: str, value: Any, must: str, near: str = "") -> Refusal:
    """Returns the refusal of a field's value. `must`: what it must be. `near`: the nearest valid value."""
    nearest = f"; the nearest valid value is {near}" if near else ""
    return Refusal(f"{name}={shown(value)} must be {must}{nearest}", name)


def not_served(name: str, value: Any, why: str) -> Refusal:
    """Returns the refusal of a value that is understood and not served. `why`: and what to send in its place."""
    return Refusal(f"{name}={shown(value)} is not served: {why}", name)


class Body(pydantic.BaseModel):
    """An object in a body. Kinds of values are never changed: "2", 2.0 and true are no whole numbers."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), arbitrary_types_allowed=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Leaves out nulls, and refuses the first unknown name, so that a million of them cost no million errors."""
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None}
        for name in given:
            if name not in cls.model_fields:
                raise Refusal(f"there is no field {shown(name)}; {_instead(name, cls.model_fields)}", name[:100])
        return given


def read(form: type[Read], value: Any, where: str = "") -> Read:
    """Returns a body, or an object in it at the place `where`. Refused: an unknown, missing or wrong field."""
    try:
        return form.model_validate(value)
    except pydantic.ValidationError as error:
        first: Mapping[str, Any] = error.errors(include_url=False)[0]
    raise _refusal(form, first, where)


def _refusal(form: type[Body], error: Mapping[str, Any], where: str) -> Refusal:
    """Returns the refusal of what pydantic found first."""
    kind, about, value = error["type"], error.get("ctx", {}), error["input"]
    name = _place((where, *error["loc"]) if where else error["loc"])
    if not error["loc"] and where:
        return wrong(where, value, "an object")
    if not error["loc"]:
        return Refusal(f"the body must be a JSON object, got {shown(value)}")
    if kind == "missing":
        return Refusal(f"{name} is missing{_missing(form, error['loc'])}", name)
    if kind == "too_long":
        return Refusal(f"{name} has {about['actual_length']} members; at most {about['max_length']} are served", name)
    for bound, must in (("ge", "at least"), ("le", "at most"), ("gt", "above"), ("lt", "below")):
        if bound in about:
            near = f"{about[bound]:g}" if isinstance(about[bound], float) else str(about[bound])
            return wrong(name, value, f"{must} {near}", near if bound in ("ge", "le") else "")
    expected = f"one of {about['expected']}" if kind == "literal_error" else _KINDS[kind]
    return wrong(name, value, expected)


def _place(place: tuple[str | int, ...]) -> str:
    """Returns a field's name as a body would be read: data[3].model_input."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one[:100]}" for one in place).removeprefix(".")


def _missing(form: type[Body], place: tuple[str | int, ...]) -> str:
    about = form.model_fields[str(place[0])].description if len(place) == 1 else None
    return f": {about}" if about else ""


def _instead(name: str, fields: Mapping[str, Any]) -> str:
    """Returns which field was meant, or which there are."""
    near = difflib.get_close_matches(name[:100], fields, n=1, cutoff=_ALIKE)
    if near:
        return f"the nearest is {near[0]!r}"
    listed = ", ".join(fields)
    return f"valid are {listed}" if len(listed) < _LONG else "the documentation lists those that are served"


# ---- kinds of fields


def whole(least: int, most: int) -> Any:
    """Returns whole numbers, both ends included."""
    return Annotated[int, Field(ge=least, le=most)]


def number(least: float, most: float) -> Any:
    """Returns finite numbers, both ends included."""
    return Annotated[float, Field(ge=least, le=most, allow_inf_nan=False)]


def _zero_or_more(value: float, info: ValidationInfo) -> float:
    if 0 < value < LEAST_OF_LAW:
        raise wrong(str(info.field_name), value, f"0 or a number from {LEAST_OF_LAW:g} to {_HOTTEST:g}", "0")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Reads a text, or a list of texts. None of them may be empty."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
        raise wrong(name, value, "a text or a list of texts, none of them empty")
    if len(listed) > MOST_STOPS:
        raise Refusal(f"{name} has {len(listed)} texts; at most {MOST_STOPS} are served", name)
    for one in listed:
        if len(one) > LONGEST_STOP:
            raise Refusal(f"{name} has a text of {len(one)} characters; at most {LONGEST_STOP} are served", name)
    return tuple(listed)


def _printable(value: str, info: ValidationInfo) -> str:
    if not value.isprintable():
        raise wrong(str(info.field_name), value, "a text of printable characters")
    return value


def only(allowed: Any, why: str, *, instead: str = "leave it out") -> Any:
    """Returns a field that is not served, but for the one value that asks for nothing; `allowed` None: there is none.

    `instead`: what the sentence of a refusal says last."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise not_served(str(info.field_name), value, f"{why}; {instead}")
        return value

    return Annotated[Any, AfterValidator(check)]


def by(reader: Callable[[str, Any], Any]) -> Any:
    """Returns a field that a function of its name and its value reads."""
    return Annotated[Any, BeforeValidator(lambda value, info: reader(str(info.field_name), value))]


def named(**fields: Any) -> dict[str, Any]:
    """Returns fields that may be left out, as pydantic.create_model takes them."""
    return {name: (kind, None) for name, kind in fields.items()}


Name = Annotated[
    str, Field(min_length=1, max_length=512), AfterValidator(_printable)
]  # of what the server made or the client calls by it
Ids = Annotated[list[whole(-LARGEST - 1, LARGEST)], pydantic.FailFast()]  # a vocabulary is checked behind it
Number = whole(0, LARGEST)


class Law(Body):
    """The sampling law of a request, without what ends it."""

    temperature: Annotated[number(0.0, _HOTTEST), AfterValidator(_zero_or_more)] | None = None
    top_p: number(LEAST_OF_LAW, 1.0) | None = None
    top_k: whole(-1, 1 << 30) | None = None  # vLLM's -1 cuts nothing, as 0 does
    max_tokens: whole(1, POSITIONS) | None = None
    seed: whole(-LARGEST - 1, LARGEST) | None = None

    def changes(self) -> dict[str, Any]:
        """Returns the changes of the policy's own parameters (types.Sampling) that it asks for."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        changes = {name: value for name, value in given.items() if value is not None}
        return changes | ({"top_k": max(self.top_k, 0)} if self.top_k is not None else {})


Stops = by(texts)


def check_ids(name: str, ids: Any, vocab: int) -> None:
    """Refuses ids that are no tokens, with the first of them."""
    for token in ids:
        if not 0 <= token < vocab:
            near = str(min(max(int(token), 0), vocab - 1))
            raise wrong(name, token, f"token ids from 0 to {vocab - 1}", near)


def check_stops(name: str, ids: Any, vocab: int, most: int) -> None:
    """Refuses ids that end no rollout, or more than an engine keeps. `most`: how many it keeps."""
    if len(ids) > most:
        raise Refusal(f"{name} has {len(ids)} ids; at most {most} are served", name)
    check_ids(name, ids, vocab)
