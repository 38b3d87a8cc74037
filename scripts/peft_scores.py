"""Log-probs of texts by transformers and peft: python peft_scores.py BASE ADAPTER TEXTS.json OUT.json [WEIGHTS]

Runs where torch, transformers and peft are installed, and jax is not needed. TEXTS.json: [[prompt ids, answer ids], ...].
OUT.json: {"logprobs": [[...], ...], "unmerged": largest number by which WEIGHTS, a directory, differs from peft's own merge}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
import transformers


def main(base: str, adapter: str, texts: str, out: str, weights: str = "") -> None:
    open_ = transformers.AutoModelForCausalLM.from_pretrained
    model = peft.PeftModel.from_pretrained(open_(base, dtype=torch.float32), adapter)
    model.eval()
    found = {"logprobs": [], "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)}}
    for prompt, answer in json.loads(Path(texts).read_text()):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
        found["logprobs"].append(torch.log_softmax(logits, -1)[range(len(answer)), answer].tolist())
    if weights:
        own, theirs = open_(weights, dtype=torch.float32).state_dict(), model.merge_and_unload().state_dict()
        found["unmerged"] = max((own[name] - theirs[name]).abs().max().item() for name in theirs)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
