"""5,000 malformed inputs of eleven kinds: each is read or refused in one sentence, in 10 s and 1 GiB.

Kinds are command line, config, rows, safetensors, llama2.c, config.json, tokenizer, chat template, Parquet, cost table and
judge. Inputs are mutated from valid ones by a seed: bits, cuts, wrong types, null, NaN, huge numbers, depth, surrogates.
Each reader runs in a child with the bounds above what it has after a valid input. A refusal counts only if it is the
reader's own error, on one line, with the name of the file or option. Some command lines run as the shell runs them. At last
faults are planted, and the harness must notice each kind.

    python scripts/show.py fuzz [--seed=N]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fuzz import children
from fuzz.commands import WANTED

MINUTES = 2.0
SOURCES = ("scripts/fuzz/*",)

CASES = {
    "command_line": 600,
    "config": 600,
    "rows": 500,
    "safetensors": 500,
    "llama2c": 300,
    "model_config": 700,
    "tokenizer": 500,
    "chat_template": 400,
    "parquet": 500,
    "cost_table": 300,
    "judge": 100,
    "processes": 24,
}


def show(record) -> None:
    seed = int(record.options.get("seed", "0"))
    with ThreadPoolExecutor(2) as pool:
        tallies = list(pool.map(lambda kind: children.run(kind, seed, 0, CASES[kind]), CASES))
    for tally in tallies:
        for outcome in ("accepted", "refused"):
            record.figure(
                f"{tally.kind}.{outcome}", tally.counts[outcome], at_least=1 if outcome == "refused" else None
            )
        record.figure(f"{tally.kind}.others", [f"{row['outcome']} {row['what'][:80]}" for row in tally.bad], equals=[])
    cases = [tally for tally in tallies if tally.kind != "processes"]
    record.figure("cases", sum(sum(tally.counts.values()) for tally in cases), at_least=5000)
    for outcome, name in (("TRACEBACK", "tracebacks"), ("HANG", "hangs"), ("MEMORY", "memory"), ("CRASH", "crashes")):
        record.figure(name, sum(tally.counts[outcome] for tally in tallies), equals=0)
    record.figure("longest_case_s", max(tally.seconds for tally in cases), at_most=10.0)
    record.figure("most_memory_above_start_bytes", max(tally.grown for tally in cases), at_most=1 << 30)
    found = children.run("planted", seed, 0, len(WANTED))
    wanted = {outcome: WANTED.count(outcome) for outcome in children.OUTCOMES}
    record.figure("planted_faults_noticed", found.counts, equals=wanted)
