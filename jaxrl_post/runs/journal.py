"""The journal of scores: every score is written when it is joined, and a resumed run reads it again.

A resumed run cuts its journal back to the restored step, like every log. Before that, scores journaled after that step
are copied to a second file (`set_apart`). When the run reaches the same rollouts again, it uses the copied scores
(`Journaled`) instead of grading again. It also journals them again.

Invariant: no score that was used is computed twice. The journal ends as if the run had never been interrupted.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxrl_post.ring import written
from jaxrl_post.ring.types import RolloutId

JOURNALS = ("rewards.jsonl", "eval_rewards.jsonl")


class Journal:
    """Appends each joined score to rewards.jsonl, one JSON object per line."""

    def __init__(self, path: str | Path):
        self._file = written.Log(path)

    def write(self, record: Mapping) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


def read_journal(path: str | Path, start: int = 0) -> list[dict]:
    """Returns the records from byte `start` on, where a line must start. Omits a last line cut short by a crash.

    Raises:
      ValueError: a line is no record.
    """
    *lines, _ = Path(path).read_bytes()[start:].split(b"\n")
    return [_parsed(path, place, line) for place, line in enumerate(lines, 1)]


class Journaled:
    """Scores from before a resume, by (rollout id, digest of its tokens). Of equal keys, the oldest comes first.

    Invariant: each score is used once, and only for exactly the tokens that were graded.
    """

    def __init__(self, records: Iterable[Mapping] = ()):
        self._records = _by_key(records)

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def find(self, rollout: RolloutId, digest: str) -> Mapping | None:
        """Returns the oldest record of this key without removing it, or None."""
        found = self._records.get((*rollout, digest))
        return found[0] if found else None

    def take(self, rollout: RolloutId, digest: str) -> Mapping:
        """Removes the record that `find` found and returns it."""
        return self._records[(*rollout, digest)].popleft()


def aside(journal: str | Path) -> Path:
    """Returns the path of the second file, for records after the restored step, for example rewards_aside.jsonl."""
    journal = Path(journal)
    return journal.with_name(f"{journal.stem}_aside{journal.suffix}")


def set_apart(journal: str | Path, start: int) -> None:
    """Copies the journal's records from byte `start` on to the second file, before the journal is cut there.

    Records copied by an earlier resume are kept, unless the journal has received them again. The journal is only read,
    so a kill at any moment loses nothing. If no record holds a score, the second file is removed: the graders were
    down and may be asked again.

    The second file has a line {"start": byte of the journal}, then records, oldest first.

    Raises:
      ValueError: a line of one of the files is no record. In this case no file is changed.
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
    written.whole(aside(journal), "".join(json.dumps(line) + "\n" for line in lines))


def read_aside(journal: str | Path) -> Journaled:
    """Returns the records in the second file of a journal, if any."""
    return Journaled(_put_before(journal)[0])


def forget_aside(folder: Path) -> None:
    """Removes the second files of all journals of a finished run."""
    for journal in JOURNALS:
        aside(folder / journal).unlink(missing_ok=True)


def _put_before(journal: str | Path) -> tuple[list[dict], list[dict]]:
    """Returns the records in the second file, and the records that the journal received since they were copied."""
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
            f"{path}: record {place} of those to be read is no record of a score ({error!r}): resume "
            "with the journal as it was written, or start a new run"
        ) from error
    return record


def _key(record: Mapping) -> tuple:
    return tuple(record[name] for name in (*RolloutId._fields, "digest"))


def _by_key(records: Iterable[Mapping]) -> dict[tuple, deque]:
    out: dict[tuple, deque] = defaultdict(deque)
    for record in records:
        out[_key(record)].append(record)
    return out
