"""One training step on a tiny shape beside TRL's and Tunix's, all on this machine and in turns.

Builds one environment per peer under .cache/peers/ (Python 3.11, a few minutes and 3 GB, once). Runs the peers' own
benchmarks of the same shape: 8 prompts x 8 rollouts of at most 128 tokens, 3.7 million parameters in float32 each. A
peer generates to the longest rollout of its batch and masks the rest, and the longest of the log-normal lengths has all
128 tokens. So its one figure is of both cases. In every round each takes its turn. Figures are medians over the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

import peers
from record import Missing, Record

MINUTES = 12.0
ROUNDS = 3
PEERS = {  # what each environment is made of; one line per call of pip, since the order matters
    "trl": ("torch==2.13.0", "trl==1.16.0 transformers"),
    "tunix": ("google-tunix==0.1.7 jax==0.10.2",),
}
SHAPE = (
    "--model",
    "qwen3",
    "--layers",
    "4",
    "--width",
    "256",
    "--prompts",
    "8",
    "--generations",
    "8",
    "--prompt-len",
    "32",
    "--new-tokens",
    "128",
    "--steps",
    "7",
    "--warmup",
    "2",
)


def show(record: Record) -> None:
    scripts = Path(os.environ.get("JAXRL_DATA", record.root.parent / "shared" / "data")).parent / "peers"
    if not scripts.is_dir():
        raise Missing(
            f"step: the peers' benchmarks {scripts} are missing; set JAXRL_DATA to the folder of real inputs, "
            f"they lie next to it"
        )
    pythons = {peer: peers.environment(record.root, peer, wanted) for peer, wanted in PEERS.items()}
    rounds = []
    for number in range(ROUNDS):
        turns = [lambda: _ours(record)] + [
            lambda p=peer: {p: _peer(record, pythons[p], scripts / f"{p}_bench.py")} for peer in PEERS
        ]
        found = {"load_before": os.getloadavg()[0]}
        for turn in turns[number % 3 :] + turns[: number % 3]:
            found |= turn()
        rounds.append(found)
        print(
            f"round {number + 1}: "
            + ", ".join(f"{name} {found[name]['step_s']:.2f} s" for name in ("fixed", "lognormal", *PEERS)),
            flush=True,
        )
    step = {
        name: statistics.median(found[name]["step_s"] for found in rounds) for name in ("fixed", "lognormal", *PEERS)
    }
    record.figure("fixed_step_s", step["fixed"], at_most=min(step["tunix"] / 1.5, 1.4 * step["trl"]))
    record.figure("lognormal_step_s", step["lognormal"], at_most=step["trl"] / 1.5)
    for peer in PEERS:
        record.figure(f"{peer}_step_s", step[peer])
        record.figure(f"{peer}_over_fixed", step[peer] / step["fixed"], at_least=1.5 if peer == "tunix" else 1 / 1.4)
        record.figure(f"{peer}_over_lognormal", step[peer] / step["lognormal"])
    record.figure("longest_lognormal_answer", rounds[0]["lognormal"]["longest_answer"], equals=128)
    for name in ("fixed", "lognormal"):
        record.figure(f"{name}_settings", rounds[0][name]["settings"])
    record.figure("rounds", rounds)


def _ours(record: Record) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        record.run("scripts/bench.py", "step", "--json", file, timeout_s=1800)
        return json.loads(file.read_text())["figures"]


def _peer(record: Record, python: Path, script: Path) -> dict:
    told = json.loads(record.said(script, *SHAPE, timeout_s=1800, python=python).splitlines()[-1])
    names = ("rollout_s", "train_s", "step_s", "peak_rss_mib", "compile_est_s", "tokens_per_step")
    return {name: told[name] for name in names}
