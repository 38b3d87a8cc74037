"""Further variants of tests that `make test-all` leaves out: each repeats on more what a test there checks.

Runs every test that is marked `shown`, also those whose show measures more than they do. All must pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

MINUTES = 25.0
LIMIT_S = 7200.0
LEAST = 150  # tests


def show(record) -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-m", "shown", "-n", "logical", "--maxprocesses", "4")
    done = subprocess.run(
        [*command, "--dist", "loadfile", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=1800", "tests"],
        cwd=record.root,
        env=os.environ | {"JAXRL_DATA": str(record.data()), "JAXRL_REQUIRE_DATA": "1"},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    record.figure("passed", counts.get("passed", 0), at_least=LEAST)
    record.figure("failed", counts.get("failed", 0) + counts.get("error", 0), equals=0)
    record.figure("skipped", counts.get("skipped", 0), equals=0)
    record.figure("exit_code", done.returncode, equals=0)
