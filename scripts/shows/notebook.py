"""The notebook, run whole on two cores: it learns in minutes, fast modes change no bit, and its page is seen in Chromium.

- Whole: every cell in one kernel that may use two cores, from a cold compilation cache. Wall time depends on what else runs
  on the machine, so the CPU seconds of all processes are bounded too: they would fit into six minutes of one core.
- Beside: the same cells, with few steps, in a kernel whose jax is too old. The install cell really makes an environment,
  all later cells run there, and no package of the kernel changes. Its jax cannot be imported at all.
- The page with all outputs is opened in headless Chromium. A planted error and a planted image must be found.
  Screenshots are left in .cache/notebook. A person has to look at them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import ipynb
import nbformat
import viewers

MINUTES = 8.0
SOURCES = (
    "notebooks/*.py",
    "notebooks/*.ipynb",
    "jaxrl_post/commands/api.py",
    "configs/demo.py",
    "scripts/plot_rounds.py",
)
SECONDS = 360.0
CORES = 2
OLD = "0.4.30"  # a jax that is too old
STEPS = 3  # whose mean is compared
EQUAL = re.compile(r"(\d+) of (\d+) rollouts have equal bits, with (\d+) accepted draft tokens")
# A cell that is added behind the last one. It says what the run left and where the cells ran. It moves one log-prob by its last
# bit, and counts the rollouts that then differ.
TOLD = """
import json, sys
from importlib import metadata
import numpy as np
planted = bits(piped.rollouts)
tokens, logprobs = planted[next(iter(planted))]
moved = np.nextafter(np.frombuffer(logprobs, np.float32), np.float32(-9)).tobytes()
planted[next(iter(planted))] = (tokens, moved[:4] + logprobs[4:])
print("TOLD" + json.dumps({"reward": run.metrics["critic/score/mean"], "rollouts": len(run.rollouts),
    "different": sum(one != planted[key] for key, one in bits(piped.rollouts).items()),
    "executable": sys.executable, "jax": metadata.version("jax"),
    "two_versions": sum(len(set(one["versions"].tolist())) > 1 for one in piped.rollouts)}))
"""


def show(record) -> None:
    source = ipynb.read(ipynb.DEMO)
    current = ipynb.DEMO.with_suffix(".ipynb").read_text(encoding="utf-8") == ipynb.text(source)
    record.figure("notebook_is_what_its_source_gives", current, equals=True)
    viewers.browser(record.root)
    whole = record.cached("whole", lambda: _run({}))
    notebook = nbformat.reads(whole["notebook"], as_version=4)
    _cells(record, "whole", notebook)
    record.figure("whole.cores", whole["cores"], equals=CORES)
    record.figure("whole.wall_seconds", whole["wall_seconds"], at_most=SECONDS)
    record.figure("whole.cpu_seconds", whole["cpu_seconds"], at_most=SECONDS)
    told = _told(notebook)
    first, last = (sum(part) / STEPS for part in (told["reward"][:STEPS], told["reward"][-STEPS:]))
    record.figure(f"whole.reward.first_{STEPS}_steps", first, at_most=0.45)
    record.figure(f"whole.reward.last_{STEPS}_steps", last, at_least=0.85)
    record.figure("whole.rollouts", told["rollouts"], equals=512 * len(told["reward"]))
    record.figure("whole.rollouts_across_a_weight_sync", told["two_versions"], at_least=1)
    record.figure("planted_fault.rollouts_with_a_changed_bit", told["different"], equals=1)
    _beside(record)
    _seen(record, notebook)


def _run(environment: dict[str, str]) -> dict:
    """Runs the notebook and a cell that tells of it, on two cores, from a cold compilation cache."""
    notebook = ipynb.read(ipynb.DEMO)
    notebook.cells.append(nbformat.v4.new_code_cell(TOLD))
    before, began = _cpu_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as cache, _cores() as cores:
        ipynb.run(notebook, ipynb.FOLDER, {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache, **environment})
    return {
        "notebook": nbformat.writes(notebook),
        "cores": cores,
        "wall_seconds": time.monotonic() - began,
        "cpu_seconds": _cpu_seconds() - before,
    }


@contextlib.contextmanager
def _cores():
    """Lets this process, and what it starts, use two cores."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:CORES])
    try:
        yield len(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, all_cores)


def _cpu_seconds() -> float:
    """Returns the seconds of processes that have ended, with theirs."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _texts(notebook) -> str:
    return "".join(
        one.get("text", "") for cell in notebook.cells for one in cell.get("outputs", ()) if one.output_type == "stream"
    )


def _told(notebook) -> dict:
    (line,) = [line for line in _texts(notebook).splitlines() if line.startswith("TOLD")]
    return json.loads(line.removeprefix("TOLD"))


def _cells(record, name: str, notebook) -> None:
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    unrun = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count is None]
    record.figure(f"{name}.cells", len(notebook.cells), at_least=20)
    record.figure(f"{name}.cells_not_run", len(unrun), equals=0)
    record.figure(f"{name}.cell_errors", sum(one.output_type == "error" for one in outputs), equals=0)
    record.figure(f"{name}.warnings", [one.text[:200] for one in outputs if one.get("name") == "stderr"], equals=[])
    found = [tuple(map(int, one)) for one in EQUAL.findall(_texts(notebook))]
    record.figure(f"{name}.comparisons", len(found), equals=2)
    for mode, (equal, compared, drafted) in zip(("speculation", "pipeline"), found):
        record.figure(f"{name}.{mode}.rollouts_compared", compared, at_least=256)
        record.figure(f"{name}.{mode}.rollouts_with_equal_bits", equal, equals=compared)
        record.figure(f"{name}.{mode}.accepted_draft_tokens", drafted, at_least=1)


def _beside(record) -> None:
    """In a kernel with an old jax, which raises where it is imported."""
    shutil.rmtree(record.root / ".venv-notebook", ignore_errors=True)
    before = _packages()
    with tempfile.TemporaryDirectory() as folder:
        plant_jax(Path(folder), OLD)
        found = _run({"PYTHONPATH": folder, "JAXRL_DEMO_STEPS": "2"})
    notebook = nbformat.reads(found["notebook"], as_version=4)
    _cells(record, "beside", notebook)
    told = _told(notebook)
    own = str(record.root / ".venv-notebook")
    record.figure("beside.why", f"because this kernel has jax {OLD}" in _texts(notebook), equals=True)
    record.figure("beside.runs_in_its_environment", told["executable"].startswith(own), equals=True)
    record.figure("beside.jax", told["jax"])
    record.figure("beside.packages_of_the_kernel_that_changed", len(before ^ _packages()), equals=0)
    record.figure("beside.wall_seconds", found["wall_seconds"])


def plant_jax(folder: Path, version: str) -> None:
    """Makes a jax of that version in a folder, which raises where it is imported."""
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").write_text("raise ImportError('the old jax was imported')\n")
    (folder / f"jax-{version}.dist-info").mkdir()
    (folder / f"jax-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n"
    )


def _packages() -> set[tuple[str, str]]:
    return {(one.name, one.version) for one in metadata.distributions(path=sys.path)}


def _seen(record, notebook) -> None:
    """Opens the page, and a copy with planted faults."""
    out = record.root / ".cache" / "notebook"
    out.mkdir(parents=True, exist_ok=True)
    page = out / "page.html"
    page.write_text(ipynb.page(notebook), encoding="utf-8")
    told = viewers.look(record.root, page, "", out)
    beside = [one for one in told["requests"] if not one.startswith(("file:", "data:"))]
    record.figure("page.bytes", page.stat().st_size, at_most=5_000_000)
    record.figure("page.browser", told["browser"])
    record.figure("page.console_errors", told["errors"], equals=[])
    record.figure("page.requests_beside_the_page", beside, equals=[])
    for width in ("desktop", "phone"):
        for what, least in (("images", 2), ("tables", 2)):
            record.figure(f"page.{width}.{what}", told[width][what], at_least=least)
        for fault in ("undrawn", "undescribed", "overflow"):
            record.figure(f"page.{width}.{fault}", told[width][fault], equals=0)
    record.figure("page.screenshots", sorted(file.name for file in out.glob("*.png")))
    planted = "<body><img src='https://localhost/planted.png'><script>throw new Error('planted')</script"
    faulty = out / "faulty.html"
    faulty.write_text(re.sub(r"<body\b", f"{planted}><div", page.read_text(encoding="utf-8"), count=1))
    found = viewers.look(record.root, faulty, "", out / "faulty")
    record.figure("planted_fault.error_is_found", "planted" in " ".join(found["errors"]), equals=True)
    record.figure("planted_fault.image_is_found", found["desktop"]["undrawn"], at_least=1)
    record.figure("planted_fault.missing_description_is_found", found["desktop"]["undescribed"], at_least=1)
