"""The values of a config.json, each checked for its kind and its bounds. Every error names file, key, value and bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.ring.json_text import shown

LARGEST = 1 << 24  # of a size: no dimension of a real model is larger
LONGEST = 1 << 31  # positions
MOST_LAYERS = 1 << 12


def number(file: Path, given: Mapping, key: str, low: float = 0.0, high: float = 1e30) -> float:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"model {file}: {key} must be a number, got {shown(value)}")
    if not low <= value <= high:  # nan too
        near = low if value < low else high
        raise ValueError(f"model {file}: {key}={shown(value)} must be from {low:g} to {high:g}; nearest is {near:g}")
    return float(value)


def above(file: Path, given: Mapping, key: str, low: float) -> float:
    value = number(file, given, key, low)
    if value == low:
        raise ValueError(f"model {file}: {key}={value:g} must be above {low:g}")
    return value


def numbers(file: Path, given: Mapping, key: str) -> tuple[float, ...]:
    """Returns a list of numbers above 0."""
    value = given.get(key)
    if not isinstance(value, list):
        raise ValueError(f"model {file}: {key} must be a list of numbers, got {shown(value)}")
    return tuple(above(file, {key: one}, key, 0.0) for one in value)


def count(file: Path, given: Mapping, key: str, most: int = LARGEST) -> int:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model {file}: {key} must be a whole number of at least 1, got {shown(value)}")
    if value > most:
        raise ValueError(f"model {file}: {key}={shown(value)} is more than {most}, the most that is read here")
    return value


def flag(file: Path, given: Mapping, key: str) -> bool:
    """Returns a truth value; null is false."""
    value = given.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"model {file}: {key} must be true or false, got {shown(value)}")
    return bool(value)


def choice(file: Path, given: Mapping, key: str, known: Mapping[str, str]) -> str:
    """Returns what a known text stands for."""
    value = given.get(key)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"model {file}: {key}={shown(value)} is not one of {', '.join(known)}")
    return known[value]


def section(file: Path, given: Mapping, key: str) -> Mapping[str, Any]:
    """Returns an object; an absent one is empty."""
    value = given.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"model {file}: {key} must be an object, got {shown(value)}")
    return value


def texts(file: Path, given: Mapping, key: str) -> Sequence[str] | None:
    """Returns a list of texts, or None where there is none."""
    value = given.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise ValueError(f"model {file}: {key} must be a list of texts, got {shown(value)}")
    return value


def named(file: Path, make: Callable[[], Any]) -> Any:
    """Returns what `make` returns. Its errors get the file's name."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"model {file}: {str(error).removeprefix('model: ')}") from error


def one_label(file: Path, given: Mapping) -> None:
    """Refuses a classifier of several labels: a reward model has one, and readers take two where none is named."""
    labels = len(section(file, given, "id2label")) or given.get("num_labels", 2)
    if labels != 1:
        raise ValueError(f"model {file}: id2label names {shown(labels)} labels, and a reward model has 1")
