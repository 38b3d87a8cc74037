"""The notebook: it is what its source gives, it runs, a kernel keeps its packages, and cells pass to a kernel beside it.

Every command of docs/colab.md runs in a copy of the project. One of them executes the whole notebook with few steps.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import nbformat
import numpy as np
import pages
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "scripts"), str(ROOT / "scripts" / "shows")]

import environment  # noqa: E402
import ipynb  # noqa: E402
import kernel_beside  # noqa: E402
import notebook as show  # noqa: E402
import pictures  # noqa: E402
import runtimes  # noqa: E402

from jaxrl_post import config, main  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE = ROOT / "docs" / "colab.md"
COPIED = ("notebooks", "scripts/ipynb.py", "scripts/drawing.py", "scripts/plot_rounds.py")
LINKED = ("configs", "constraints", "jaxrl_post", "kernels", "pyproject.toml")


@pytest.fixture
def copy(tmp_path) -> Path:
    """The project, with notebooks that may be written."""
    (tmp_path / "scripts").mkdir()
    for name in COPIED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def ran(command, folder, **variables):
    words = [sys.executable if word == "python" else word for word in command]
    env = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


COMMANDS = [("scripts/ipynb.py",), ("scripts/ipynb.py", "--check"), ("scripts/ipynb.py", "--html=runs/notebook.html")]


def test_the_page_has_the_commands_that_are_run_here():
    assert [one.words[1:] for one in pages.commands(PAGE)] == COMMANDS


def run_of_the_page(copy, words):
    (one,) = [one for one in pages.commands(PAGE) if one.words[1:] == words]
    done = ran(one.words, copy, **one.environment)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_notebook_is_written_and_checked_as_the_page_says(copy):
    (copy / "notebooks" / "jaxrl_post_demo.ipynb").unlink()
    run_of_the_page(copy, COMMANDS[0])
    run_of_the_page(copy, COMMANDS[1])
    assert (copy / "notebooks" / "jaxrl_post_demo.ipynb").read_bytes() == ipynb.DEMO.with_suffix(".ipynb").read_bytes()


@pytest.mark.shown("notebook")
@pytest.mark.slow
def test_the_whole_notebook_runs_with_few_steps_as_the_page_says(copy):
    run_of_the_page(copy, COMMANDS[2])
    html = (copy / "runs" / "notebook.html").read_text()
    compared = [tuple(map(int, one)) for one in show.EQUAL.findall(html)]
    assert [name for name in ("reward: ", "Timeline of slots", "mean log-prob", "✗") if name not in html] == []
    assert len(compared) == 2 and all(equal == of > 0 and drafted > 0 for equal, of, drafted in compared)
    assert not re.findall(r'src="https?:', html)


def test_the_notebook_is_what_its_source_gives(copy):
    with open(copy / "notebooks" / "jaxrl_post_demo.py", "a") as file:
        file.write("\n# %%\nprint(1)\n")
    done = ran(["python", "scripts/ipynb.py", "--check"], copy)
    assert done.returncode == 1 and "run python scripts/ipynb.py" in done.stdout
    read = nbformat.read(ipynb.DEMO.with_suffix(".ipynb"), as_version=4)
    assert not [cell for cell in read.cells if cell.get("outputs")]


def test_the_first_cell_fetches_nothing_from_a_placeholder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = next(cell for cell in ipynb.read(ipynb.DEMO).cells if cell.cell_type == "code")
    with pytest.raises(ValueError, match="REPOSITORY names no owner yet"):
        exec(first.source, {})
    assert not list(tmp_path.iterdir())


CELLS = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'notebooks')!r}); import pathlib, environment\n"
    f"environment.prepare(pathlib.Path({str(ROOT)!r}))\n"
    "import os, signal, threading; threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()",
    "import time\ntry:\n    time.sleep(120)\nexcept KeyboardInterrupt:\n    print('interrupted')",
    "import sys, jaxrl_post, runtimes\nprint(sys.executable); print('to stderr', file=sys.stderr)",
    "from IPython.display import display\nshown = display('one', display_id=True)\nshown.update('two')",
    "%env BESIDE=1",
    "6 * 7",
    "1 / 0",
    "print('after an error')",
    "import os; os._exit(3)",
)


def test_cells_run_in_an_environment_beside_a_kernel_with_an_old_jax(tmp_path):
    """The planted jax cannot be imported, so the last cells run elsewhere. A kernel that dies is said, not waited for."""
    show.plant_jax(tmp_path, "0.4.30")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    for cell in notebook.cells[6:]:
        cell.metadata["tags"] = ["raises-exception"]
    ipynb.run(notebook, tmp_path, {"PYTHONPATH": str(tmp_path), environment.OWN: sys.executable})
    first, interrupted, *out = [cell.outputs for cell in notebook.cells]
    needed = next(one for one in environment.requirements(ROOT) if one.name == "jax")
    said = "".join(one.text for one in first)
    assert f"because this kernel has jax 0.4.30 and not {needed.specifier}" in said
    assert f"There: Python {sys.version.split()[0]}, jax {metadata.version('jax')}." in said
    assert "".join(one.text for one in interrupted) == "interrupted\n"
    assert {one.name: one.text for one in out[0]} == {"stdout": f"{sys.executable}\n", "stderr": "to stderr\n"}
    assert [one.data["text/plain"] for one in out[1]] == ["'two'"]
    assert out[2][0].text == "env: BESIDE=1\n" and out[3][0].data["text/plain"] == "42"
    (error,) = out[4]
    assert "ZeroDivisionError" in error.evalue and "1 / 0" in re.sub(r"\x1b\[[\d;]*m", "", "".join(error.traceback))
    assert "".join(one.text for one in out[5]) == "after an error\n"  # it may come in two pieces
    assert "died" in out[6][-1].evalue


def test_a_line_is_sent_once():
    once = kernel_beside.sent(["a = 1\n", "print('it\\'s')"])
    assert kernel_beside.sent(once) == once and kernel_beside.sent([]) == []
    asked = []
    exec("".join(once), {kernel_beside.NAME: type("Kernel", (), {"run": staticmethod(asked.append)})})
    assert asked == ["a = 1\nprint('it\\'s')"]


def test_packages_are_lacking_or_too_old():
    here = metadata.version("numpy")
    needed = [Requirement("numpy>=1"), Requirement("numpy>=99"), Requirement("no-such-package-here>=2")]
    assert environment.unmet(needed) == (["no-such-package-here>=2"], [f"numpy {here} and not >=99"])
    assert environment.unmet(environment.requirements(ROOT)) == ([], [])
    names = {one.name for one in environment.requirements(ROOT)}
    assert {"jax", "matplotlib"} <= names and "ipykernel" not in names


@pytest.mark.extended
@pytest.mark.parametrize("wanted, code", [("numpy>=1", 0), ("numpy>=99", 1)])
def test_pins_let_pip_change_no_package(tmp_path, wanted, code):
    (tmp_path / "pins.txt").write_text(environment.pins())
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "-c", str(tmp_path / "pins.txt"), wanted]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == code and "Would install" not in done.stdout
    assert f"jax=={metadata.version('jax')}\n" in environment.pins()
    assert ("ResolutionImpossible" in done.stderr) == bool(code)


def wheel(folder, name, *needed):
    """Writes a wheel with a module of its name, which needs other packages."""
    info = f"{name}-1.0.dist-info"
    about = "".join(f"Requires-Dist: {one}\n" for one in needed)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "FOUND = 1\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{about}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("needed, fits", [((), True), (("numpy<1",), False)])
def test_a_kernel_gets_what_it_lacks_only_where_no_package_changes(tmp_path, monkeypatch, needed, fits):
    """pip runs really, on wheels of this test, into a folder of its own."""
    wheel(tmp_path, "lacking", *needed)
    for name, value in dict(NO_INDEX="1", FIND_LINKS=str(tmp_path), TARGET=str(tmp_path / "to")).items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert environment.installed(["lacking>=1"]) is fits
    assert (tmp_path / "to" / "lacking.py").is_file() is fits


@pytest.mark.extended
def test_a_package_that_is_nowhere_is_no_reason_for_an_environment(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="pip install nowhere failed: .*nowhere"):
        environment.installed(["nowhere"])


def test_the_environment_is_made_by_pip_of_the_kernel(tmp_path):
    venv, pip = environment.commands(ROOT, tmp_path / "own", (3, 12), ["jax[tpu]"])
    assert venv[1:] == ["-m", "venv", "--clear", "--without-pip", str(tmp_path / "own")]
    assert str(ROOT / "constraints" / "py3.12.txt") in pip and pip[-2:] == [f"{ROOT}[notebook]", "jax[tpu]"]
    subprocess.run(venv, check=True)
    listed = [*pip[: pip.index("install")], "list", "--disable-pip-version-check"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert subprocess.run(listed, check=True, capture_output=True, text=True, env=alone).stdout.strip() == ""
    with pytest.raises(ValueError, match=r"Python 3\.9, and the project needs 3\.11 to 3\.13"):
        environment.commands(ROOT, tmp_path, (3, 9), [])


@pytest.mark.parametrize("driver, wanted", [("580.65.06", "jax[cuda13]"), ("550.54.15", "jax[cuda12]")])
def test_jax_for_the_accelerator_is_chosen_by_the_driver(tmp_path, monkeypatch, driver, wanted):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {driver}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert environment.accelerator() == [wanted]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert environment.accelerator() == []


@pytest.mark.parametrize("kind, slice", [("gpu", "t4"), ("gpu", "l4"), ("tpu", "v5e-1")])
def test_settings_of_each_runtime_fit(kind, slice, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = runtimes.of(kind).options
    given = [f"--config.{name.replace('__', '.')}={value}" for name, value in options.items()]
    assert main.main([f"--config={runtimes.CONFIG}", *given, "--dry-run", f"--slice={slice}"]) == 0
    assert " fits" in capsys.readouterr().out


def test_runtimes_train_by_one_recipe():
    """What is generated at once differs, and nothing that decides what is learned."""
    read = []
    for one in runtimes.RUNTIMES.values():
        values = config.load(str(ROOT / runtimes.CONFIG)).to_dict() | {"eval": {"prompts": 0}}
        config.assign(values, one.options)
        read.append(config.resolve(values))
    same = ("scheduler", "algorithm", "optimizer", "sampling", "data", "seed", "steps")
    assert all(getattr(one, name) == getattr(read[0], name) for one in read for name in same)
    assert len({one.engine.slots for one in read}) == 2
    with pytest.raises(ValueError, match=r"no settings for 'rocm'; known are cpu, gpu, tpu"):
        runtimes.of("rocm")


def test_tables_show_texts_as_texts():
    row = {"step": 3, "prompt": "1+1=", "text": "<script>", "reward": None, "tokens": np.arange(4)}
    html = pictures.rollouts([row | {"logprobs": np.array([-1.0, -2.0], np.float32)}]).data
    assert "&lt;script&gt;" in html and "<script>" not in html
    assert [cell for cell in ("none", ">4<", "-1.500") if cell not in html] == []
    one = lambda text: [type("Rollout", (), {"text": text})]  # noqa: E731
    html = pictures.before_and_after(["p"], [one("a<b")], [one("right")], lambda prompt, text: text == "right").data
    assert "✗ a&lt;b" in html and "✓ right" in html
