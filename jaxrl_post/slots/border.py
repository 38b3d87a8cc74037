"""What an engine refuses at its border: sizes that cannot serve anybody, and requests that can never be served."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_post.slots.columns import Sizes
from jaxrl_post.types import MOST_ENDS, Request


def check_sizes(sizes: Sizes, row_sizes: Sequence[int]) -> None:
    """ValueError: row sizes below the slots, or pages for less than one rollout."""
    if max(row_sizes) < sizes.slots:
        raise ValueError(f"engine.row_sizes={tuple(row_sizes)} must reach engine.slots={sizes.slots}: every running slot "
                         f"needs a row; nearest valid size is {sizes.slots}")
    if sizes.pages * sizes.page < sizes.max_length:
        raise ValueError(f"engine.pages={sizes.pages} of {sizes.page} cannot hold one rollout of engine.max_length="
                         f"{sizes.max_length}; the nearest valid value is {sizes.blocks}")


def check_request(request: Request, sizes: Sizes, vocab_size: int, *, decodes: bool) -> None:
    """ValueError: it can never fit, or asks for what this engine was not built for."""
    name, need, most = request.rollout_id, request.prompt.tokens.size + request.max_tokens, sizes.max_length
    ends = len(request.sampling.eos_ids) + len(request.sampling.stop_ids)
    if need > most:
        raise ValueError(f"request {name}: prompt of {request.prompt.tokens.size} and max_tokens={request.max_tokens} need "
                         f"{need} positions, engine.max_length={most}; the largest valid max_tokens is "
                         f"{most - request.prompt.tokens.size}")
    if not 0 <= request.replica < sizes.replicas:
        raise ValueError(f"request {name}: replica {request.replica} of {sizes.replicas}")
    if ends > MOST_ENDS:
        raise ValueError(f"request {name}: {ends} eos and stop ids, at most {MOST_ENDS}")
    if request.sampling.restricted and not sizes.restricted:
        raise ValueError(f"request {name}: top_k={request.sampling.top_k} and top_p={request.sampling.top_p} need an engine "
                         "with restricted=True; the nearest valid values are 0 and 1.0")
    if request.sampling.stop_strings and not decodes:
        raise ValueError(f"request {name}: stop_strings need an engine with a tokenizer")
    if np.any(request.prompt.tokens < 0) or np.any(request.prompt.tokens >= vocab_size):
        raise ValueError(f"request {name}: prompt has a token outside 0..{vocab_size - 1}")
