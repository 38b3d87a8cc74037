"""The two doors to kernels/: in a checkout and in a wheel, from the root and from elsewhere; versions and constraints."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxrl_post

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("pyproject.toml", "MANIFEST.in", "jaxrl_post", "kernels")
# Prints where a kernel and the package come from, as the interpreter finds them; neither imports jax.
WHERE = (
    "import importlib.util as u, jaxrl_post as p; "
    "print(u.find_spec('jaxrl_post.kernels.planted').origin, p.__file__, p.__version__, sep='\\n')"
)


def run(*command, cwd: Path, path: str | None = None) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env.update({"PYTHONPATH": path} if path else {})
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.split()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what is packaged, with one more kernel, so that nothing installed can answer in its place."""
    root = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    (root / "kernels" / "planted.py").write_text("FOUND = 1\n")
    return root


def version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "jaxrl_post" / "__init__.py").read_text())[1]


def test_the_door_works_without_installing_from_the_root(checkout):
    assert run(sys.executable, "-c", WHERE, cwd=checkout) == [
        str(checkout / "kernels" / "planted.py"),
        str(checkout / "jaxrl_post" / "__init__.py"),
        version(),
    ]


def test_the_door_works_without_installing_from_elsewhere(checkout, tmp_path):
    assert run(sys.executable, "-c", WHERE, cwd=tmp_path, path=str(checkout))[0] == str(
        checkout / "kernels" / "planted.py"
    )


def test_every_kernel_is_found_through_the_door():
    names = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
    assert names
    code = (
        "import importlib.util as u, sys; print(*[u.find_spec('jaxrl_post.kernels.' + n).origin for n in sys.argv[1:]])"
    )
    found = run(sys.executable, "-c", code, *names, cwd=ROOT)
    assert found == [str(ROOT / "kernels" / f"{name}.py") for name in names]


def test_the_top_level_kernels_folder_shadows_nobody(checkout, tmp_path):
    """Another distribution's regular package `kernels` wins over our folder, even from the root of the checkout."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OTHER = 1\n")
    assert run(sys.executable, "-c", "import kernels; print(kernels.OTHER)", cwd=checkout, path=str(tmp_path)) == ["1"]


def test_constraints_pin_every_dependency_and_name_no_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        re.match(r"[\w-]+", text)[0].lower().replace("_", "-")
        for text in [
            *project["dependencies"],
            *(
                name
                for extra in ("test", "lint", "plot", "notebook", "tensorboard", "wandb", "docs", "aot-tpu", "aot-cuda")
                for name in project["optional-dependencies"][extra]
            ),
        ]
    }
    jax = {"3.11": "0.10.2", "3.12": "0.11.2", "3.13": "0.11.2"}
    files = sorted((ROOT / "constraints").glob("py*.txt"))
    assert [file.stem.removeprefix("py") for file in files] == list(jax)
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        pins = {}
        for line in lines:
            pin = re.fullmatch(r"([\w.-]+)==([\w.+]+)", line)
            assert pin, f"{file.name}: {line!r} is no NAME==VERSION"
            pins[pin[1].lower().replace("_", "-")] = pin[2]
        assert not needed - set(pins), f"{file.name} lacks {needed - set(pins)}"
        assert (
            pins["jax"]
            == pins["jaxlib"]
            == pins["jax-cuda13-pjrt"]
            == pins["jax-cuda13-plugin"]
            == jax[file.stem.removeprefix("py")]
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """The python of a new virtual environment that borrows this one's packages, to install into without downloads."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)[0])
    # A plain path, not a site directory: the editable hooks of the lender do not run. Read after what is installed here.
    lender = run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)[0]
    (site / "borrowed.pth").write_text(f"{lender}\n")
    return python


def install(python: Path, folder: Path, *what) -> None:
    """Replaces whatever this project is in the environment. pip sees only what lies in the environment itself."""
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--force-reinstall",
        *what,
        cwd=folder,
    )


def test_wheel_sdist_and_editable(checkout, environment, tmp_path):
    site = Path(run(environment, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)[0])
    out = tmp_path / "out"
    out.mkdir()
    build = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    wheel = out / run(environment, "-c", build, "wheel", out, cwd=checkout)[-1]
    sdist = out / run(environment, "-c", build, "sdist", out, cwd=checkout)[-1]
    _check_wheel(wheel, checkout)
    for archive in (wheel, sdist):  # the sdist is built into a wheel once more
        install(environment, tmp_path, archive)
        installed = [
            str(site / "jaxrl_post" / "kernels" / "planted.py"),
            str(site / "jaxrl_post" / "__init__.py"),
            version(),
        ]
        assert run(environment, "-c", WHERE, cwd=tmp_path) == installed
    install(environment, tmp_path, "--editable", checkout)
    edited = [str(checkout / "kernels" / "planted.py"), str(checkout / "jaxrl_post" / "__init__.py"), version()]
    assert run(environment, "-c", WHERE, cwd=tmp_path) == edited
    assert run(environment, "-c", WHERE, cwd=checkout) == edited


def _check_wheel(wheel: Path, checkout: Path) -> None:
    """It holds every module once, the parts of the report's page, templates and schema of jobs with its licence, and nothing else."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = {path.relative_to(checkout).as_posix() for path in (checkout / "jaxrl_post").rglob("*.py")}
    modules |= {f"jaxrl_post/{path.relative_to(checkout).as_posix()}" for path in (checkout / "kernels").glob("*.py")}
    page = {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "jaxrl_post" / "telemetry" / "page").iterdir()
        if path.suffix in (".html", ".css", ".js")
    }
    folder = checkout / "jaxrl_post" / "launch" / "jobs"
    jobs = {path.relative_to(checkout).as_posix() for path in (*folder.glob("schema/*"), *folder.glob("templates/*"))}
    assert len(page) >= 3 and len(jobs) == 2 + 4 and sorted(names) == sorted(modules | page | jobs)


@pytest.mark.parametrize("old, new", sorted(jaxrl_post._MOVED.items()))
def test_an_old_name_of_a_module_says_the_new_one(old, new):
    assert importlib.util.find_spec(f"jaxrl_post.{new}")
    said = f"`jaxrl_post.{old}` is now `jaxrl_post.{new}`"
    with pytest.raises(ModuleNotFoundError, match=said):
        importlib.import_module(f"jaxrl_post.{old}")
    with pytest.raises(AttributeError, match=said):
        getattr(jaxrl_post, old)
