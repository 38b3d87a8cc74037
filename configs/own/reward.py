"""A reward function with verl's four arguments. It returns a number, or a dict with "score" and any named components;
"acc" is what evaluation and dynamic sampling look at."""

from __future__ import annotations


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict[str, float]:
    """1 for the right answer, less the further off it is."""
    told = solution_str.rpartition("#")[2]
    if not told.isdigit():
        return {"score": 0.0, "acc": 0.0}
    off = abs(int(told) - int(ground_truth))
    return {"score": 1.0 / (1.0 + off), "acc": float(off == 0)}
