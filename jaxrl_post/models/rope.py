"""The rule that stretches rotation frequencies for longer texts, and its keys in config.json (models/families.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_post.models import config_keys as keys
from jaxrl_post.ring.json_text import shown

_ORIGINAL = "original_max_position_embeddings"
ROPE_KINDS = ("linear", "llama3", "yarn", "dynamic", "longrope")
# What transformers takes for an absent rule, by model_type; of others it is none.
ABSENT = {
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        _ORIGINAL: 4096,
    }
}


class RopeScaling(NamedTuple):
    """The rule that stretches rotation frequencies for longer texts. None depends on the length of a text at hand.

    - "linear" divides all frequencies by `factor`.
    - "llama3" (Llama 3.1, arXiv 2407.21783) divides only those of long wavelengths. Between original_length/high and
      original_length/low it blends.
    - "yarn" (arXiv 2309.00071) keeps pairs that turn more than beta_fast times in original_length positions. It divides
      those that turn less than beta_slow times, and blends between by the pair's index, as the authors' code does.
      `truncate`: the two bounds are rounded outwards to whole indices.
    - "dynamic" changes nothing up to the model's max_length, and no text is longer. `factor` only goes back to the file.
    - "longrope" (arXiv 2402.13753) divides each frequency by a factor of its own. All positions take the long factors
      where the model's max_length is beyond original_length, else the short ones.

    original_length: positions of the training before. attention_factor: of cosines and sines, None as `turn_scale` says.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def check(self, head_dim: int, theta: float) -> None:
        """Refuses a rule that cannot be computed with these heads and this theta."""
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"model: rope_scaling.kind={self.kind!r} is not one of {', '.join(ROPE_KINDS)}")
        if self.kind == "yarn" and theta <= 1:
            raise ValueError(f"model: rope_theta={theta:g} must be above 1, because yarn divides by its logarithm")
        if self.kind != "longrope":
            return
        if self.original_length < 2:
            raise ValueError(
                f"model: original length {self.original_length} of longrope must be at least 2, because longrope divides by "
                f"its logarithm"
            )
        for name, factors in (("short", self.short_factors), ("long", self.long_factors)):
            if len(factors) != head_dim // 2:
                raise ValueError(
                    f"model: longrope has {len(factors)} {name} factors, expected {head_dim // 2}, one for each "
                    f"pair of head_dim={head_dim}"
                )


def read(file: Path, given: Mapping, about: Mapping) -> RopeScaling | None:
    """Returns the rule of a config.json `given` whose rope parameters are `about`.

    For yarn, dynamic and longrope an original length beside the rope parameters goes before one among them. An absent
    one is max_position_embeddings. Both are as in transformers 5.
    """
    kind = about.get("rope_type", about.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", keys.above(file, about, "factor", 0.0))
    if kind == "llama3":
        low = keys.above(file, about, "low_freq_factor", 0.0)
        return RopeScaling(
            "llama3",
            keys.above(file, about, "factor", 0.0),
            low,
            keys.above(file, about, "high_freq_factor", low),
            keys.count(file, about, _ORIGINAL, keys.LONGEST),
        )
    if kind not in ROPE_KINDS:
        raise ValueError(f"model {file}: rope type {shown(kind)} is not one of default, {', '.join(ROPE_KINDS)}")
    truncate = keys.flag(file, {"truncate": True, **about}, "truncate")
    length = keys.count(file, given, "max_position_embeddings", keys.LONGEST)
    about = {name: value for name, value in about.items() if value is not None}
    about = {_ORIGINAL: length, **about} | ({} if given.get(_ORIGINAL) is None else {_ORIGINAL: given[_ORIGINAL]})
    original = keys.count(file, about, _ORIGINAL, keys.LONGEST)
    if kind == "dynamic":
        if original < length:
            raise ValueError(
                f"model {file}: max_position_embeddings={length} is beyond {_ORIGINAL}={original}, from where rope type dynamic "
                f"depends on the length of a text; the nearest valid value is {original}"
            )
        return RopeScaling("dynamic", keys.number(file, about, "factor", 1.0))
    if kind == "longrope":
        about = {"factor": max(1.0, length / original), **about}
    factor = keys.number(file, about, "factor", 1.0)
    own = keys.above(file, about, "attention_factor", 0.0) if "attention_factor" in about else None
    if kind == "longrope":
        short, long = (keys.numbers(file, about, name) for name in ("short_factor", "long_factor"))
        return RopeScaling(
            kind, factor, original_length=original, attention_factor=own, short_factors=short, long_factors=long
        )
    over, under = (keys.number(file, {name: 0, **about}, name) for name in ("mscale", "mscale_all_dim"))
    if own is None and over and under:
        own = (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
    slow = keys.number(file, {"beta_slow": 1.0, **about}, "beta_slow", 1e-3)
    fast = keys.number(file, {"beta_fast": 32.0, **about}, "beta_fast", slow)
    return RopeScaling(
        kind, factor, original_length=original, attention_factor=own, beta_fast=fast, beta_slow=slow, truncate=truncate
    )


def write(scaling: RopeScaling | None, kind: str) -> dict[str, Any] | None:
    """Returns the rope parameters of a rule for a model_type, without theta. None is written where it means no rule."""
    if scaling is None:
        return {"rope_type": "default"} if kind in ABSENT else None
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("linear", "dynamic"):
        return out
    out |= {_ORIGINAL: scaling.original_length}
    if scaling.kind == "llama3":
        return out | {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    if scaling.attention_factor is not None:
        out |= {"attention_factor": scaling.attention_factor}
    if scaling.kind == "longrope":
        return out | {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return out | {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
