"""JetStream's orchestrator serves stories260K over gRPC: 64 requests, greedy tokens equal to the engine's own.

google-jetstream 0.2.2 runs twice, each time against the engine driven directly beside it:

- here: on this project's Python and libraries. JetStream is laid into a folder below .cache/peers/, without what it
  asks for, so that nothing is installed into this environment.
- apart: in an environment of its own with the extra `jetstream` and all that it asks for, TensorFlow included. The
  versions are those of constraints/py3.11.txt and constraints/jetstream.txt. It is made once: some minutes and 3 GB.

In both, scripts/jetstream_requests.py sends some requests one by one, then all at once, by ids and by text. It sends
requests that cannot be served, and leaves one in the middle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import peers

MINUTES = 4.0
PLATFORM = "cpu"
LIMIT_S = 1800.0
LAID = "google-jetstream==0.2.2 grpcio==1.85.3 prometheus-client==0.26.0 shortuuid==1.0.13"
PINS = ("constraints/py3.11.txt", "constraints/jetstream.txt")


def show(record) -> None:
    model = record.data("tinystories-260k", "stories260K.bin")
    here = _served(record, Path(sys.executable), model, _laid(record.root))
    extra = " ".join([*(f"-c {record.root / pins}" for pins in PINS), f"-e {record.root}[jetstream]"])
    apart = _served(record, peers.environment(record.root, "jetstream", [extra]), model)
    for name, found in (("here", here), ("apart", apart)):
        _record(record, name, found)
    pairs = zip(here["requests"], apart["requests"], strict=True)
    record.figure("apart.rollouts_unlike_here", sum(one["direct"] != two["direct"] for one, two in pairs))


def _laid(root: Path) -> Path:
    """Returns a folder with JetStream for this interpreter. Makes it where it is not there or has other versions."""
    place = root / ".cache" / "peers" / f"jetstream-{sys.version_info.major}.{sys.version_info.minor}"
    done = place / "requirements.txt"
    if not (done.is_file() and done.read_text() == LAID):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade", "--no-deps"]
        subprocess.run([*pip, "--target", str(place), *LAID.split()], check=True)
        done.write_text(LAID)
    return place


def _served(record, python: Path, model: Path, *folders: Path) -> dict:
    """Returns what scripts/jetstream_requests.py found with this interpreter, with `folders` behind the project on its path."""
    path = os.pathsep.join(map(str, (record.root, *folders)))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [str(python), "scripts/jetstream_requests.py", str(model), str(out)]
        subprocess.run(command, cwd=record.root, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=LIMIT_S)
        return json.loads(out.read_text())


def _record(record, name: str, found: dict) -> None:
    requests = found["requests"]
    record.figure(f"{name}.python", found["python"])
    record.figure(f"{name}.versions", found["versions"])
    record.figure(f"{name}.requests", len(requests), equals=64)
    record.figure(f"{name}.tokens", sum(len(one["direct"]) for one in requests), at_least=4000)
    unlike = sum(one["loaded"] != one["direct"] for one in requests)
    record.figure(f"{name}.under_load_with_other_tokens", unlike, equals=0)
    alone = [one for one in requests if "alone" in one]
    record.figure(f"{name}.alone", len(alone), equals=8)
    record.figure(f"{name}.alone_with_other_tokens", sum(one["alone"] != one["direct"] for one in alone), equals=0)
    texts = [one for one in requests if "served_text" in one]
    record.figure(f"{name}.by_text", len(texts), equals=32)
    unlike = sum(one["served_text"] != one["direct_text"] for one in texts)
    record.figure(f"{name}.texts_unlike", unlike, equals=0)
    record.figure(f"{name}.tokens_per_second", sum(len(one["loaded"]) for one in requests) / found["seconds"])
    refused = [text for text in found["refused"].values() if text.startswith("INVALID_ARGUMENT: ")]
    record.figure(f"{name}.wrong_requests", len(found["refused"]), equals=7)
    record.figure(f"{name}.refused_in_a_sentence", len(refused), equals=7)
    record.figure(f"{name}.refusals", found["refused"])
    record.figure(f"{name}.tokens_before_a_client_left", found["cancelled_after"], at_least=1)
    record.figure(f"{name}.equal_afterwards", found["again"] == requests[0]["direct"], equals=True)
    record.figure(f"{name}.live", found["live"], equals=True)
