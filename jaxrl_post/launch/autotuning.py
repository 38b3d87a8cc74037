"""What XLA:GPU found fastest when it timed forms of a product: kept beside the compiled programs, and known by digests.

XLA writes a file for each fusion that it timed, into a folder of the compilation cache. A later compilation of the same fusion
reads its file and times nothing. So all processes and runs that share the cache get the same products, and the same bits. Process
0 of a job writes, and the others read. Where the cache lies in a bucket, these files travel with the programs.

By the digests a resumed run sees that results of its save are others now, or gone. Its programs may then be others too, if the
cache has lost them as well.

On a CPU and on TPUs there are no such files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxrl_post.runs.checkpoint import store
from jaxrl_post.runs.program_cache import AUTOTUNING

RESULTS = "autotuning"  # of the digests, where a run says what its bits depend on


def results(folder: str | None = None) -> dict[str, str]:
    """Returns 16 hex digits of each file of results, by name. folder: of compiled programs; None: the one in use."""
    home = folder or jax.config.jax_compilation_cache_dir
    files = (Path(home) / AUTOTUNING).glob("*") if home else ()
    return {
        file.name: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        for file in sorted(files)
        if file.is_file()
    }


def digest(found: Mapping[str, str]) -> str:
    """Returns 16 hex digits of all results, or nothing where there are none."""
    told = "".join(f"{name} {one}\n" for name, one in sorted(found.items()))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest() if found else ""


def with_results(
    about: Mapping, saved: store.Saved | None, found: Mapping[str, str], say: Callable[[str], object]
) -> dict:
    """Returns `about` with the results, and says how many of the save are others or gone. New ones are no matter of the save."""
    then = saved.about.get(RESULTS, {}) if saved is not None else {}
    others = [name for name, one in then.items() if found.get(name) != one]
    if others:
        say(
            f"autotuning: {len(others)} of the {len(then)} results of the save are others or gone, so that bits may differ; "
            "use its JAX_COMPILATION_CACHE_DIR"
        )
    return {**about, RESULTS: dict(found)} if found else {**about}
