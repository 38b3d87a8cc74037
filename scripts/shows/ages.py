"""No committed result is old: 21 days at most before the present commit, where the code that it vouches for has changed.

Days are those between the dates of two commits: the one that the result was measured on, and HEAD. A result that lists no
source files vouches for the whole product. Results of benches count as those of shows do.
"""

from __future__ import annotations

import json
import subprocess

import sources

MINUTES = 0.2
SOURCES = ("scripts/sources.py", "scripts/results/*.json")
DAYS = 21.0


def show(record) -> None:
    found = {file.stem: json.loads(file.read_text()) for file in sorted(record.root.glob("scripts/results/*.json"))}
    found.pop(record.name, None)
    now = sources.hashes(record.root, {path for result in found.values() for path in result.get("sources", ())})
    head = _date(record.root, "HEAD")
    days, changed, unknown = {}, {}, []
    for name, result in found.items():
        measured = _date(record.root, result.get("commit"))
        if measured is None:
            unknown.append(name)
            continue
        days[name] = round((head - measured) / 86400, 2)
        changed[name] = _changed(record.root, result, now)
    record.figure("num_results", len(found), at_least=10)
    record.figure("oldest_days", max(days.values()))
    record.figure("median_days", sorted(days.values())[len(days) // 2])
    record.figure("num_changed", sum(map(bool, changed.values())))
    record.figure("of_unknown_commits", unknown, equals=[])
    record.figure("of_uncommitted_changes", [name for name, result in found.items() if result.get("dirty")])
    old = {name: days[name] for name in days if days[name] > DAYS and changed[name]}
    record.figure("older_than_21_days_and_changed", old, equals={})


def _date(root, commit: str | None) -> int | None:
    """Seconds since the epoch at which the commit was made, or None where git does not know it."""
    done = subprocess.run(["git", "show", "-s", "--format=%ct", str(commit)], cwd=root, text=True, capture_output=True)
    return None if done.returncode else int(done.stdout)


def _changed(root, result: dict, now: dict[str, str]) -> int:
    """How many of the files that the result vouches for have changed."""
    if "sources" in result:
        return sum(now.get(path) != old for path, old in result["sources"].items())
    command = ["git", "diff", "--name-only", result["commit"], "--", "jaxrl_post", "kernels"]
    return len(subprocess.run(command, cwd=root, text=True, capture_output=True, check=True).stdout.split())
