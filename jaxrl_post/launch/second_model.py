"""A second model beside the policy, such as a teacher or a reward model: what is refused of its folder.

Invariant: it has the policy's tokens, and a position for every token of a rollout. It is known by the hash of its folder
(checkpoint/identity.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxrl_post.data import tokenizer
from jaxrl_post.json_text import of_hub
from jaxrl_post.models import decoder, hf


@dataclass(frozen=True, kw_only=True)
class SecondModel:
    """A model on this machine: its folder and its shape."""

    place: Path
    model: decoder.ModelConfig


def opened(
    named: str, path: str, words: tokenizer.Tokenizer, longest: int, *, kind: str, scalar: bool = False
) -> SecondModel:
    """Returns a model that reads the policy's rollouts. Its weights are not looked at.

    Args:
      named: the option that names it.
      words: the policy's tokenizer.
      longest: engine.max_length, of prompt and rollout together.
      kind: what it is, with an article.
      scalar: whether it is a reward model.

    Raises:
      ValueError: one sentence with the first difference.
    """
    place, named = Path(path), f"{named}={path}"
    if not (place / "config.json").is_file():
        folder = "reward_model" if scalar else "policy"
        raise ValueError(
            f"{named}: no such folder with a config.json{of_hub(path)}; {kind} is a Hugging Face directory, such as the {folder}/ of a run"
        )
    model = hf.read_config(place / "config.json")
    if scalar and not model.scalar:
        raise ValueError(
            f"{named} is a policy: a reward model's architecture is ...ForSequenceClassification; train one with "
            "algorithm.loss_mode='bradley_terry'"
        )
    if model.scalar and not scalar:
        raise ValueError(f"{named} is a reward model, which gives tokens no probability; {kind} is a policy")
    if model.vocab_size < words.vocab_size:
        raise ValueError(
            f"{named}: its model has {model.vocab_size} tokens and the policy's tokenizer {words.vocab_size}; {kind} reads "
            "the policy's tokens"
        )
    if difference := _difference(words, tokenizer.load(place)):
        raise ValueError(f"{named}: {difference}; {kind} has the policy's tokenizer")
    if model.max_length < longest:
        raise ValueError(
            f"{named}: it has {model.max_length} positions, fewer than engine.max_length={longest}; the nearest valid "
            f"engine.max_length is {model.max_length}"
        )
    return SecondModel(place=place, model=model)


def _difference(ours: tokenizer.Tokenizer, theirs: tokenizer.Tokenizer) -> str:
    """Returns how the tokens of two tokenizers differ, or an empty text."""
    if ours.vocab_size != theirs.vocab_size:
        return f"its tokenizer has {theirs.vocab_size} tokens, the policy's {ours.vocab_size}"
    exact = all(isinstance(words, tokenizer.JsonTokenizer) for words in (ours, theirs))
    for index in range(ours.vocab_size):
        own, other = (_token(words, index, exact) for words in (ours, theirs))
        if own != other:
            return f"token {index} of its tokenizer is {other!r}, of the policy's {own!r}"
    return ""


def _token(words: tokenizer.Tokenizer, index: int, exact: bool) -> str | None:
    """Returns a token as its vocabulary writes it. Vocabularies of two kinds are compared by what a token decodes to."""
    if exact and isinstance(words, tokenizer.JsonTokenizer):
        return words.model.id_to_token(index)
    return words.decode([index], skip_special=False)
