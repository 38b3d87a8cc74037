"""What makes the engine fast changes no token of a model with a recurrent state either: engines and whole runs, bit for bit.

1. own: the suite of tests/test_engine_hybrid.py. It has drafts with rejections, clones, candidates, preemption, parking, a state that
   is copied for the samples of a prompt, and a swap that keeps. Every planted fault is found, a late commit that is off by a row
   among them.
2. engines: the suites of the row engine on a model whose first layer has a gated delta rule.
3. runs: the suites of whole runs. They have kill and resume, pipeline, drafts, environments, a move to other devices, and replay of
   logged rollouts.

`--arms=NAME,NAME` runs some of these.
"""

from __future__ import annotations

MINUTES = 30.0
PLATFORM = "cpu"
ENVIRONMENT = {"LAB_MODEL": "hybrid"}
FAULTS = 5
# Files, and which of their tests. Left out: bytes of pages alone, what counts how far a fixed number of dispatches comes, and what
# needs a step whose groups come in pieces. Dispatches end more often here, where samples of a prompt wait for its state. The suite of
# the wide prompt program is left out too. It compiles without optimizations, and there the place of a row changes its rounding.
ENGINES = {
    "test_engine_equality.py": (
        "not sinks and not heads_by_kind and not embeddings_of_each_layer and not verify_after_a_swap and not keep_carries_versions"
    ),
    "test_engine_carry.py": "not verify_gives and not keep_loses_no_step",
    "test_engine_checkpoint.py": "not re_enter_alike",
    "test_engine_drafting.py": "",
    "test_engine_elastic.py": "not one_layout_alone and not fewer_replicas and not drafts_go_on",
    "test_engine_head_rows.py": "",
    "test_engine_one_read.py": "",
    "test_engine_sharded.py": "",
    "test_engine_speculation.py": "",
    "test_engine_tail_batching.py": "",
    "test_engine_whole_hosts.py": "",
    "test_serve_slots.py": "",
}
RUNS = {
    "test_main.py": "",
    "test_main_resume.py": "",
    "test_main_pipeline.py": "not turns",
    "test_main_tail_batching.py": "",
    "test_main_speculation.py": "",
    "test_main_environments.py": "",
    "test_main_moved.py": "",
    "test_commands_replay.py": "",
}


def show(record) -> None:
    arms = record.options.get("arms", "own,engines,runs").split(",")
    if "own" in arms:
        record.figure("own.tests_passed", record.passed("tests/test_engine_hybrid.py", "", timeout_s=1200), at_least=10)
        record.planted("tests/test_engine_hybrid.py", FAULTS)
    for arm, suites in (("engines", ENGINES), ("runs", RUNS)):
        for file, selection in suites.items() if arm in arms else ():
            name = file.removeprefix("test_").removesuffix(".py")
            passed = record.passed(f"tests/{file}", selection, timeout_s=3000, env=ENVIRONMENT)
            record.figure(f"{arm}.{name}.tests_passed", passed, at_least=1)
