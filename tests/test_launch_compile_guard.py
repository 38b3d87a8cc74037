"""The guard names what was compiled after warm-up, and only that."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.launch.compile_guard import CompileGuard, use_cache


def test_a_new_shape_fails_and_is_named():
    def advance_rows(x):
        return x * 2

    program = jax.jit(advance_rows)
    with CompileGuard() as guard:
        three, four = jnp.ones(3), jnp.ones(4)
        program(three)
        guard.arm()
        program(three)  # known: no error
        with pytest.raises(RuntimeError, match=r"recompilation after warm-up of .*advance_rows.*float32\[4\]"):
            program(four)
    program(jnp.ones(5))  # outside the guard everything may be compiled


def test_before_it_is_armed_nothing_fails():
    with CompileGuard() as guard:
        jax.jit(lambda x: x + 1)(jnp.ones(2))
        guard.arm()
        guard.disarm()
        jax.jit(lambda x: x + 2)(jnp.ones(2))


def test_the_cache_lies_where_the_environment_says(tmp_path):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        assert use_cache({"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "a"), "XDG_CACHE_HOME": "/x"}) == tmp_path / "a"
        assert use_cache({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "jaxrl_post" / "jax"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxrl_post" / "jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_a_lifted_guard_comes_back():
    """Armed or not, it is afterwards what it was before, also after an error."""
    values = jnp.ones(13)
    with CompileGuard() as guard:
        with guard.lifted():
            jax.jit(lambda x: x * 11)(values)
        jax.jit(lambda x: x * 12)(values)  # it was not armed
        guard.arm()
        with pytest.raises(KeyError), guard.lifted():
            jax.jit(lambda x: x * 13)(values)
            raise KeyError
        with pytest.raises(RuntimeError, match="recompilation after warm-up"):
            jax.jit(lambda x: x * 14)(values)
