"""A kernel beside the notebook's own: it runs the cells, and the notebook shows what they print and display.

The notebook's kernel sends every later cell to it and imports nothing of the run. Outputs that are updated in place, errors
with their traceback, and interrupts pass through. Both kernels end together. What a frontend reads from the notebook's kernel
by itself, such as completions and lists of variables, stays that kernel's.
"""

from __future__ import annotations

import atexit
import json
import queue
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.display import clear_output, publish_display_data
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

NAME = "kernel_beside"  # of the kernel, and of the variable in the notebook
SENT = f"{NAME}.run("
START_S = 120.0
ALIVE_S = 1.0  # how often a silent kernel is asked whether it still lives
SHOWN = ("display_data", "execute_result", "update_display_data")


class Failed(Exception):
    """An exception of a cell, shown as the other kernel showed it."""

    def __init__(self, content: Mapping[str, Any]):
        super().__init__(f"{content['ename']}: {content['evalue']}")
        self.lines = list(content["traceback"])

    def _render_traceback_(self) -> list[str]:
        return self.lines


class KernelBeside:
    """Starts a kernel of an interpreter that has ipykernel.

    python: of the environment. folder: the kernel's working directory. environment: its variables.

    Raises:
      RuntimeError: it is not ready within START_S seconds.
    """

    def __init__(self, python: Path, folder: Path, environment: Mapping[str, str]):
        self.folder = tempfile.TemporaryDirectory(prefix=NAME)
        spec = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "language": "python"}
        file = Path(self.folder.name, NAME, "kernel.json")
        file.parent.mkdir()
        file.write_text(json.dumps({**spec, "display_name": NAME}))
        known = KernelSpecManager(kernel_dirs=[self.folder.name], ensure_native_kernel=False)
        socket = str(Path(self.folder.name, "socket"))  # absolute: the kernel may have another working directory
        self.manager = KernelManager(kernel_name=NAME, kernel_spec_manager=known, transport="ipc", ip=socket)
        self.manager.start_kernel(cwd=str(folder), env=dict(environment))
        atexit.register(self.end)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)

    def end(self) -> None:
        """Ends the kernel and the processes that it started."""
        atexit.unregister(self.end)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.folder.cleanup()

    def take_over(self) -> None:
        """Sends every later cell of this notebook to the kernel."""
        shell = get_ipython()
        shell.user_ns[NAME] = self
        shell.input_transformers_cleanup.append(sent)

    def run(self, source: str) -> None:
        """Runs a cell and shows its outputs as they come. An interrupt is handed on.

        Raises:
          Failed: the cell raised. RuntimeError: the kernel died.
        """
        # Why a thread: an interrupt of the main one while it reads from a socket would lose the message.
        messages: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(source, messages), daemon=True).start()
        failed = None
        while (message := self._next(messages)) is not None:
            if isinstance(message, RuntimeError):
                raise message
            if message["msg_type"] == "error":
                failed = Failed(message["content"])
            else:
                _show(message["msg_type"], message["content"])
        if failed is not None:
            raise failed

    def _next(self, messages: queue.SimpleQueue) -> Any:
        while True:
            try:
                return messages.get()
            except KeyboardInterrupt:
                self.manager.interrupt_kernel()

    def _read(self, source: str, messages: queue.SimpleQueue) -> None:
        """Puts the messages of a cell into the queue, then None; a RuntimeError where the kernel dies."""
        asked = self.client.execute(source, allow_stdin=False)
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=ALIVE_S)
            except queue.Empty:
                if self.manager.is_alive():
                    continue
                messages.put(RuntimeError("the kernel beside the notebook died; restart the notebook and run it again"))
                return
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                self.client.get_shell_msg(timeout=START_S)  # the reply, which says no more than the messages did
                messages.put(None)
                return
            messages.put(message)


def sent(lines: list[str]) -> list[str]:
    """Returns the lines of a cell as one line that sends them to the kernel. A line that does so is left as it is."""
    text = "".join(lines)
    return lines if text.startswith(SENT) or not text.strip() else [f"{SENT}{text!r})\n"]


def _show(kind: str, content: Mapping[str, Any]) -> None:
    if kind == "stream":
        print(content["text"], end="", file=getattr(sys, content["name"]), flush=True)
    elif kind in SHOWN:
        update = kind == "update_display_data"
        publish_display_data(
            content["data"], content["metadata"], transient=content.get("transient") or {}, update=update
        )
    elif kind == "clear_output":
        clear_output(content["wait"])
