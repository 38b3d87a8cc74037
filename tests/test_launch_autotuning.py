"""Results of autotuning beside the compiled programs: their digests, and what a resumed run says of them."""

from __future__ import annotations

from types import SimpleNamespace

import jax
from jax._src import compiler

from jaxrl_post.launch import autotuning, compile_guard
from jaxrl_post.runs.program_cache import AUTOTUNING


def test_results_are_known_by_name_and_bytes(tmp_path):
    assert autotuning.results(str(tmp_path)) == {} and autotuning.digest({}) == ""
    folder = tmp_path / AUTOTUNING
    (folder / "tmp").mkdir(parents=True)  # where XLA writes a file before it has its name
    (folder / "b.textproto").write_text("block_m: 64")
    first = autotuning.results(str(tmp_path))
    (folder / "a.textproto").write_text("block_m: 64")
    both = autotuning.results(str(tmp_path))
    assert list(both) == ["a.textproto", "b.textproto"] and len(set(both.values())) == 1
    assert both["b.textproto"] == first["b.textproto"]
    (folder / "b.textproto").write_text("block_m: 32")
    changed = autotuning.results(str(tmp_path))
    digests = [autotuning.digest(one) for one in (first, both, changed)]
    assert len(set(digests)) == 3 and all(len(one) == 16 for one in digests)


def test_a_resumed_run_says_what_is_another_result_or_gone():
    said, saved = [], SimpleNamespace(about={"autotuning": {"a": "1", "b": "2", "c": "3"}})
    about = autotuning.with_results({"x": 1}, saved, {"a": "1", "b": "2", "c": "3", "new": "4"}, said.append)
    assert said == [] and about == {"x": 1, "autotuning": {"a": "1", "b": "2", "c": "3", "new": "4"}}
    autotuning.with_results({}, saved, {"a": "1", "b": "0"}, said.append)
    assert said == [
        "autotuning: 2 of the 3 results of the save are others or gone, so that bits may differ; "
        "use its JAX_COMPILATION_CACHE_DIR"
    ]
    assert autotuning.with_results({"x": 1}, None, {}, said.append) == {"x": 1} and len(said) == 1


def test_the_compiler_is_told_the_folder_and_process_0_writes(tmp_path):
    with compile_guard.restored():
        home = compile_guard.use_cache({"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})
        options = compiler.get_compile_options(1, 1, backend=jax.devices()[0].client)
        told = options.executable_build_options.debug_options
        assert told.xla_gpu_per_fusion_autotune_cache_dir == str(home / AUTOTUNING)
        assert "UPDATE" in str(told.xla_gpu_experimental_autotune_cache_mode) or (
            told.xla_gpu_experimental_autotune_cache_mode == 1
        )
