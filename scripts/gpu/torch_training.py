"""Training by a plain loop in torch on the same card, beside ours: weights in float32, products in bfloat16.

Attention is torch's own (sdpa), AdamW is fused, and torch.compile makes the step. One row of tokens is multiplied at a
time, since nothing is computed twice and the memory holds no more. A step has as many rows as ours. torch need not be
there. It alone holds the device in its process, so nothing here asks jax for it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu import timing, torch_decoding, training
from gpu.part import Part

from jaxrl_post.models.decoder import ModelConfig
from jaxrl_post.models.presets import PRESETS

TOKENS, STEPS = 4096, 3  # of a row; steps that are timed


def steps(
    part: Part,
    model: ModelConfig = PRESETS[training.PRESET],
    preset: str = training.PRESET,
    tokens: int = TOKENS,
    rows: int = training.MICRO_BATCHES * training.ROWS[TOKENS],
    device: str = "cuda",
) -> None:
    """Writes seconds of a step, MFU, and our speed over the peer's, with one sequence in a row.

    Raises:
      ImportError: torch or transformers is not there.
    """
    key = f"torch_train.{preset}.{tokens}_tokens_1_sequences"
    if not part.wants(key, 50.0):
        return
    import torch

    policy = torch_decoding.drawn(model, device, torch.float32).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    run = torch.compile(policy)
    took = [_step(run, optimizer, model.vocab_size, rows, tokens, device) for _ in range(1 + STEPS)]
    step, about = statistics.median(took[1:]), timing.chip(torch.cuda.get_device_name() if device == "cuda" else "")
    flops = training.useful(model, rows * [tokens])
    ours = part.told[f"train.{preset}.{tokens}_tokens_1_sequences"]["step_s"]
    told = {"step_s": step, "mfu": flops / step / about.flops if about else None, "ours_over_peer": step / ours}
    part.figure(key, told)


def _step(run: Any, optimizer: Any, vocab: int, rows: int, tokens: int, device: str) -> float:
    """Returns the seconds of one optimizer step, waited for."""
    import torch

    batch = torch.randint(vocab, (rows, 1, tokens), device=device)
    begun = time.perf_counter()
    for row in batch:
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=row, labels=row, use_cache=False).loss
        (loss / rows).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
