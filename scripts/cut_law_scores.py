"""Log-probs, entropies and gradients of cut laws by transformers: python cut_law_scores.py POLICY REFERENCE TEXTS.json OUT

Runs in float64 where torch and transformers are installed, and jax is not needed. TEXTS.json is a list of rollouts: prompt,
answer, kept (ids of each token), temperature, top_k, top_p, and weights of each token's log-prob and entropy in a sum.

OUT is a folder. Its scores.json has log-probs, entropies and log-probs of the reference. Beside them are the ids that sorting
keeps, and how near another set is. Its gradient.safetensors has the gradient of the sum by each tensor of the policy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def main(policy: str, reference: str, texts: str, out: str) -> None:
    own, theirs = (_open(place) for place in (policy, reference))
    total, found = torch.zeros((), dtype=torch.float64), []
    for text in json.loads(Path(texts).read_text()):
        scores = _scores(own, text)
        laws = [_law(row, kept, token) for row, kept, token in zip(scores, text["kept"], text["answer"], strict=True)]
        total = total + sum(
            w * logp + u * entropy
            for (logp, entropy), w, u in zip(laws, text["of_logprob"], text["of_entropy"], strict=True)
        )
        with torch.no_grad():
            rows = zip(_scores(theirs, text), text["kept"], text["answer"], strict=True)
            other = [float(_law(*row)[0]) for row in rows]
            cuts = [_cut(row.detach(), text["top_k"], text["top_p"]) for row in scores]
        found.append(
            {
                "logprobs": [float(logp.detach()) for logp, _ in laws],
                "entropies": [float(entropy.detach()) for _, entropy in laws],
                "reference": other,
                "kept": [kept for kept, _ in cuts],
                "edges": [edge for _, edge in cuts],
            }
        )
    total.backward()
    Path(out).mkdir(exist_ok=True)
    (Path(out) / "scores.json").write_text(json.dumps({"transformers": transformers.__version__, "texts": found}))
    grads = {name: leaf.grad.contiguous() for name, leaf in own.named_parameters()}
    save_file(grads, str(Path(out) / "gradient.safetensors"))


def _open(place: str):
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64, attn_implementation="eager")
    return model.eval()


def _scores(model, text: dict) -> torch.Tensor:
    """Returns the logits before each token of the answer, divided by the temperature, [T, V]."""
    ids = torch.tensor([text["prompt"] + text["answer"]])
    return model(ids).logits[0, len(text["prompt"]) - 1 : -1].double() / text["temperature"]


def _law(scores: torch.Tensor, kept: list[int], token: int) -> tuple[torch.Tensor, torch.Tensor]:
    logps = torch.log_softmax(scores[kept] if kept else scores, -1)
    return logps[kept.index(token) if kept else token], -(logps.exp() * logps).sum()


def _cut(scores: torch.Tensor, top_k: int, top_p: float) -> tuple[list[int], float]:
    """Returns the ids that top-k, then top-p keep, in order, and how near another set is, in scores or in mass."""
    falling, order = torch.sort(scores, descending=True, stable=True)
    count, edge = len(falling), float("inf")
    if 0 < top_k < count:
        count, edge = top_k, float(falling[top_k - 1] - falling[top_k])
    if top_p < 1:
        mass = torch.cumsum(torch.softmax(falling[:count], -1), -1)
        edge = min([edge, *(mass[:-1] - top_p).abs().tolist()])
        count = int((mass < top_p).sum()) + 1
    return sorted(order[:count].tolist()), edge


if __name__ == "__main__":
    main(*sys.argv[1:])
