"""An engine's tokens, log-probs and entropies do not depend on candidates, with the kernels inside it."""

from __future__ import annotations

from typing import Any

from gpu.part import Part

from jaxrl_post.models.model_config import ModelConfig

PAGE = 64
MODEL = ModelConfig(
    vocab_size=4096, embed=512, layers=4, heads=8, kv_heads=2, head_dim=128, ffw=1024, max_length=512, tied=True
)


def candidates(part: Part, count: int = 64, model: ModelConfig = MODEL) -> None:
    """Compares the bits of rollouts without candidates with those under right, mixed and wrong ones."""
    import engine_lab as lab
    import jax
    import jax.numpy as jnp
    import numpy as np

    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), lab.weights(0, model))
    engine = lab.engine(
        params,
        model,
        dtype=jnp.bfloat16,
        max_length=384,
        page_size=PAGE,
        pages=128,
        row_sizes=(128,),
        restricted=True,
        cost=any_cost((128,)),
    )
    asked = lab.requests(count, vocab=model.vocab_size, longest=96, longest_prompt=200, cuts=((0, 1.0), (50, 0.9)))
    plain, noise = lab.run(engine, asked), np.random.default_rng(0)
    part.figure("equality.num_tokens", sum(len(r) for r in plain.values()), at_least=count)
    for kind, right in (("right", 1.0), ("mixed", 0.8), ("wrong", 0.0)):
        texts = [plain[r.rollout_id].tokens for r in asked]
        guesses = [np.where(noise.random(text.size) < right, text, 7) for text in texts]
        engine.reset()
        engine.metrics()
        out = lab.run(engine, [lab.with_guesses(r, g) for r, g in zip(asked, guesses)])
        part.figure(f"equality.bits_equal_{kind}_candidates", lab.same_bits(plain, out), equals=True)
        part.figure(f"equality.accepted_{kind}_candidates", engine.metrics()["spec/num_accepted"])


def any_cost(sizes: tuple[int, ...]) -> Any:
    """Returns a step-cost table that decides nothing, as every run here has one row size."""
    from jaxrl_post.engine import step_cost

    return step_cost.analytic("h200", 1, 2, sizes)
