"""The journal of scores: written the moment they are joined, read again by a run that resumes."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxrl_post.telemetry.rollout_log import _whole
from jaxrl_post.types import RolloutId

JOURNALS = ("rewards.jsonl", "eval_rewards.jsonl")


class Journal:
    """Every score the moment it was joined, one JSON object per line: rewards.jsonl, for the pool of rewards."""

    def __init__(self, path: str | Path):
        self._file = open(path, "a", encoding="utf-8")

    def write(self, record: Mapping) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_journal(path: str | Path, start: int = 0) -> list[dict]:
    """Its records from byte `start` on, where a line begins; a last line that a crash cut short is left out.

    Raises:
      ValueError: a line is no record.
    """
    *lines, _ = Path(path).read_bytes()[start:].split(b"\n")
    return [_parsed(path, place, line) for place, line in enumerate(lines, 1)]


class Journaled:
    """Scores of a run's earlier life, to be taken by (rollout id, digest of its tokens): of equal keys the oldest first.

    Invariant: a score is served for the very tokens that it was given for, and once.
    """

    def __init__(self, records: Iterable[Mapping] = ()):
        self._records = _by_key(records)

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def find(self, rollout: RolloutId, digest: str) -> Mapping | None:
        """The record, which stays; None where there is none."""
        found = self._records.get((*rollout, digest))
        return found[0] if found else None

    def take(self, rollout: RolloutId, digest: str) -> Mapping:
        """What `find` found, once."""
        return self._records[(*rollout, digest)].popleft()


def aside(journal: str | Path) -> Path:
    """Where the records of a journal are put that came after the restored step: rewards_aside.jsonl."""
    journal = Path(journal)
    return journal.with_name(f"{journal.stem}_aside{journal.suffix}")


def put_aside(journal: str | Path, start: int) -> None:
    """Puts the journal's records from byte `start` on aside, before somebody cuts it there. What was put aside before
    stays, but for what the journal has got again since then. A kill at any moment loses nothing: the journal is only
    read. Records without one single score are dropped: the graders were down, and may be asked again.

    The file: a line {"start": byte of the journal}, then records, oldest first.

    Raises:
      ValueError: a line of one of the files is no record; then nothing was changed.
    """
    later = read_journal(journal, start) if Path(journal).is_file() else []
    before, since = _put_before(journal)
    again = {key: len(records) for key, records in _by_key(since).items()}
    for record in before:
        if again.get(_key(record), 0) > 0:
            again[_key(record)] -= 1
        else:
            later.append(record)
    if not any(record["scored"] for record in later):
        aside(journal).unlink(missing_ok=True)
        return
    lines = [{"start": start}, *later]
    _whole(aside(journal), "".join(json.dumps(line) + "\n" for line in lines).encode())


def read_aside(journal: str | Path) -> Journaled:
    """What was put aside of a journal, if anything."""
    return Journaled(_put_before(journal)[0])


def forget_aside(folder: Path) -> None:
    """The run whose journals lie there has ended: nothing will come again."""
    for journal in JOURNALS:
        aside(folder / journal).unlink(missing_ok=True)


def _put_before(journal: str | Path) -> tuple[list[dict], list[dict]]:
    """What was put aside, and what the journal has got since then."""
    there = aside(journal)
    if not there.is_file():
        return [], []
    text = there.read_bytes()
    head, newline, _ = text.partition(b"\n")
    start = json.loads(head)["start"]
    return read_journal(there, len(head + newline)), read_journal(journal, start) if Path(journal).is_file() else []


def _parsed(path: str | Path, place: int, line: bytes) -> dict:
    try:
        record = json.loads(line)
        _key(record), record["scored"], record["reward"], record["components"], record["counts"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: record {place} of those to be read is no record of a score ({error!r}): a journal is "
            "gone on with as it was written, or the run is begun anew"
        ) from error
    return record


def _key(record: Mapping) -> tuple:
    return tuple(record[name] for name in (*RolloutId._fields, "digest"))


def _by_key(records: Iterable[Mapping]) -> dict[tuple, deque]:
    out: dict[tuple, deque] = defaultdict(deque)
    for record in records:
        out[_key(record)].append(record)
    return out
