"""Decoding by transformers' `generate` on the same card, beside ours: random weights of the same shape, the same lengths.

torch and transformers need not be there. They alone hold the device in their process, so nothing here asks jax for it.
Rollouts are drawn at temperature 1 without an end. A step is the mean of those that our arm times, the median of three
calls behind one that warms up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from gpu import decoding
from gpu.part import Part

from jaxrl_post.models.decoder import ModelConfig
from jaxrl_post.models.presets import PRESETS

NAME = "qwen2_5_1_5b"
POINTS = ((16, 1024), (64, 1024))  # rollouts, and tokens of each prompt
CALLS = 3  # that are timed


class Marks:
    """Ends nothing, and notes the time when the device has made so many tokens of each rollout."""

    def __init__(self, torch: Any, at: Sequence[int]):
        self._torch, self._at, self._made, self.seconds = torch, at, 0, []

    def __call__(self, input_ids, scores, **kwargs):
        self._made += 1
        if self._made in self._at:
            if input_ids.is_cuda:
                self._torch.cuda.synchronize()
            self.seconds.append(time.perf_counter())
        return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool, device=input_ids.device)


def eager(part: Part, **sizes: Any) -> None:
    """Times `generate` as it is by default: a cache that grows, and no compiler."""
    generate(part, "generate_eager", None, **sizes)


def compiled(part: Part, **sizes: Any) -> None:
    """Times `generate` with a cache of fixed size, for which transformers compiles the step."""
    generate(part, "generate_compiled", "static", **sizes)


def generate(
    part: Part,
    section: str,
    cache: str | None,
    *,
    name: str = NAME,
    model: ModelConfig = PRESETS[NAME],
    points: Sequence[tuple[int, int]] = POINTS,
    device: str = "cuda",
) -> None:
    """Writes milliseconds of a step, and our tokens per second over the peer's.

    Raises:
      ImportError: torch or transformers is not there. RuntimeError: what should be compiled was not.
    """
    keys = {point: f"{section}.{name}.batch_{point[0]}_context_{point[1]}" for point in points}
    wanted = {point: key for point, key in keys.items() if part.wants(key, 30.0)}
    if not wanted:
        return
    import torch

    policy = drawn(model, device, torch.bfloat16).eval()
    for (batch, context), key in wanted.items():
        if not part.wants(key, 30.0):
            continue
        took = [_step(policy, cache, batch, context) for _ in range(1 + CALLS)]
        if cache == "static" and not hasattr(policy, "_compiled_call"):
            raise RuntimeError(f"transformers compiles no step of generate on {device}")
        step = statistics.median(took[1:])
        ours = part.told[f"decode.{name}.batch_{batch}_context_{context}"]["tokens_per_s"]
        part.figure(key, {"step_ms": 1e3 * step, "tokens_per_s": batch / step, "ours_over_peer": ours * step / batch})


def drawn(model: ModelConfig, device: str, dtype: Any) -> Any:
    """Returns transformers' model of this shape on random weights."""
    import torch
    import transformers

    shape = transformers.Qwen2Config(
        vocab_size=model.vocab_size,
        hidden_size=model.embed,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.ffw,
        max_position_embeddings=model.max_length,
        tie_word_embeddings=model.tied,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    assert shape.hidden_size // shape.num_attention_heads == model.head_dim
    with torch.device(device):
        return transformers.Qwen2ForCausalLM(shape).to(dtype)


def _step(policy: Any, cache: str | None, batch: int, context: int) -> float:
    """Returns the mean seconds of the steps that one call makes behind its first dispatch's worth."""
    import torch

    first, last = decoding.STEPS + 1, (decoding.TURNS + 1) * decoding.STEPS + 1
    marks = Marks(torch, (first, last))
    prompts = torch.randint(policy.config.vocab_size, (batch, context), device=policy.device)
    policy.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=last,
        pad_token_id=0,
        cache_implementation=cache,
        stopping_criteria=[marks],
    )
    before, after = marks.seconds
    return (after - before) / (last - first)
