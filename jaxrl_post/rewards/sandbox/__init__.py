"""Runs judged programs apart from the tests that judge them, confined by what the host gives.

`host` starts programs and measures them. `examiner` runs tests against a program. `wire` carries values between the
two. `launcher`, `confinement` and `program` run on the program's side.

Levels:

- "none": a process of its own with limits of memory, file size, open files and CPU time. What it starts ends with it.
- "basic": also an account of its own where the caller is root, Landlock and seccomp. The program is one process with
  one thread. It reads the interpreter's files alone, writes nothing, and reaches no network and no other process.
- "strict": also user, mount, pid, net, ipc and uts namespaces, with a read-only root and a bounded /tmp of its own.

At no level does the program share memory, descriptors or environment with the tests, or live on without its judge. The
page docs/data_and_rewards.md lists what each level closes.
"""

from __future__ import annotations

from collections import Counter

LEVELS = ("none", "basic", "strict")
counts: Counter[str] = Counter()  # of this process since they were last told: "restarts" of launchers that had died
AUTO = "auto"  # the highest level of "strict" and "basic" that the host gives


class Unavailable(RuntimeError):
    """The host does not give a layer of the level that was requested."""
