"""The pool against graders that loop, raise, die, sleep and lie; every score is known by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.rewards import jobs
from jaxrl_post.rewards.pool import Graders, Pool
from jaxrl_post.rewards.printed import Printed
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId
from jaxrl_post.runs.journal import Journaled

GRADERS = """
import os, sys, time
from jaxrl_post.rewards import Overrun

def number(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str)

def mixed(data_source, solution_str, ground_truth, extra_info):
    word, _, rest = solution_str.partition(" ")
    if word == "loop":
        while True: pass
    if word == "raise": raise RuntimeError("broken grader")
    if word == "exit": os._exit(3)
    if word == "quit": sys.exit(0)
    if word == "sleep": time.sleep(60)
    if word == "nan": return float("nan")
    if word == "none": return None
    if word == "huge": return 1e300
    if word == "over": raise Overrun(float(rest)) if rest else Overrun
    if word == "print": print("x" * 100000)
    if word == "once":
        if os.path.exists(rest): return 0.5
        open(rest, "w").close()
        os._exit(1)
    if word == "late": time.sleep(float(rest))
    if word == "child":
        import subprocess
        print(subprocess.Popen(["sleep", "60"]).pid, file=open(rest, "w"), flush=True)
        time.sleep(60)
    if word == "bad": return {"acc": 1}
    return 1.0

def named(data_source, solution_str, ground_truth, extra_info=None, **more):
    size = len(solution_str)
    return {"score": size, "acc": solution_str == ground_truth, "half": size / 2, "pred": "text"}

def told(extra_info, ground_truth, solution_str, data_source):
    assert extra_info["rollout"]["prompt_end"] == "asked", extra_info
    assert data_source == "src" and ground_truth == "gold" and extra_info["k"] == [1, 2], (data_source, extra_info)
    return extra_info["rollout"]["tokens"] + (extra_info["rollout"]["finish"] == "eos") / 2

def clean(a, b, c, d):
    return float("jax" not in sys.modules and "numpy" not in sys.modules)

def hash_of(a, b, c, d):
    return float(hash(b) % 1000)

def short(a, b): return 0
value = 3

def trl(completions, **columns):
    return [float(len(text)) for text in completions]

def trl_all(prompts, completions, completion_ids, k, ground_truth, rollout, **columns):
    told = (prompts, completions, len(completion_ids[0]), k, ground_truth, rollout[0]["finish"])
    assert told == (["asked"], ["word"], 1, [[1, 2]], ["gold"], "eos"), told
    assert callable(columns.pop("log_metric")) and callable(columns.pop("log_extra"))
    assert columns == {"answer": ["gold"], "data_source": ["src"]}, columns
    return [1.25]

def trl_chat(*, prompts, completions):
    return [float(prompts == [[{"role": "user", "content": "q"}]] and completions == [[
        {"role": "assistant", "content": "word"}]])]

def applies(completions, **columns):
    return [float(text) if text.replace(".", "").isdigit() else None for text in completions]

def wrong_count(completions): return [1.0, 2.0, 3.0]
def bare_number(completions): return 1.0
def needs_level(completions, level): return [float(level[0])]
def positional(completions, /): return [1.0]

async def later(completions_ids, **columns):
    import asyncio
    await asyncio.sleep(0.01)
    return [float(len(ids)) for ids in completions_ids]

async def later_verl(data_source, solution_str, ground_truth, extra_info): return len(solution_str)

def rank(prompts, completions, completion_ids, ground_truth, k, rollout, **columns):
    # the place of each completion in its group: only a function that gets all of them can tell
    assert {len(each) for each in (prompts, completion_ids, ground_truth, k, rollout, columns["data_source"])} == {
        len(completions)}, (prompts, completion_ids, ground_truth, k, rollout)
    with open(CALLS, "a") as file: print(*completions, file=file)
    return [float(sorted(completions).index(text)) for text in completions]

def flaky(completions, **columns):
    if not os.path.exists(CALLS):
        open(CALLS, "w").close()
        raise KeyError("first time")
    return [1.0 for text in completions]

def slow(completions, **columns):
    time.sleep(0.2 * len(completions))
    return [1.0 for text in completions]

def never(completions, **columns):
    time.sleep(60)

def logs(completions, log_metric, log_extra, **columns):
    log_metric("share", 0.25)
    log_extra("length", [len(text) for text in completions])
    log_extra("head", [text[:1] for text in completions])
    return [None if text == "none" else 1.0 for text in completions]

def state(completions, trainer_state): return [1.0]
def state_if_any(completions, trainer_state=None): return [float(trainer_state is None) for _ in completions]

def talks(data_source, solution_str, ground_truth, extra_info):
    print("said", solution_str)
    print("complained", solution_str, file=sys.stderr)
    os.system(f"echo a child said {solution_str}")
    return 1.0

def deep(data_source, solution_str, ground_truth, extra_info):
    return inner(solution_str)

def inner(text):
    return {"a": 1.0}[text]
"""
# What a test process warns of where it forks: a reward worker has neither jax nor threads, it may have both.
FORKS = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("os.fork:RuntimeWarning", "This process:DeprecationWarning")
]
TEXTS: list[str] = ["", "asked"]  # 1 is the token of every prompt


@pytest.fixture
def graders(tmp_path) -> str:
    (tmp_path / "graders.py").write_text(GRADERS.replace("CALLS", repr(str(tmp_path / "calls"))))
    return str(tmp_path / "graders.py")


def rollout(text: str, sample: int = 0, prompt: str = "p", epoch: int = 0, purpose: str = "train") -> Rollout:
    """A rollout whose one token is the number of its text."""
    TEXTS.append(text)
    asked = Prompt(id=prompt, tokens=[1], answer="gold", source="src", extra={"k": np.array([1, 2])})
    return Rollout.written(RolloutId(0, purpose, epoch, prompt, sample), asked, [len(TEXTS) - 1], Finish.EOS)


def group(*rollouts: Rollout) -> Group:
    return Group.unscored(rollouts[0].prompt, rollouts)


def text_of(tokens, before=(), skip_special=True) -> str:
    return TEXTS[tokens[0]]


def pool(path: str, *names: str, **given) -> Pool:
    """A pool of these functions of a file, or of the one that `path` names whole; none without a path."""
    functions = tuple(f"{path}:{name}" for name in names) or tuple(filter(None, [path]))
    about = {field.name: given.pop(field.name) for field in dataclasses.fields(Graders) if field.name in given}
    graders = Graders(functions=functions, **dict(workers=2, timeout_s=1.0) | about)
    return Pool(graders, **dict(decode=text_of) | given)


def joined(rewards: Pool, *rollouts: Rollout) -> Group:
    """The scored group of rollouts, after each has been started."""
    for one in rollouts:
        rewards.start(one)
    return rewards.join(group(*rollouts))


def scores(rewards: Pool, *texts: str, **given) -> Group:
    return joined(rewards, *(rollout(text, i, **given) for i, text in enumerate(texts)))


class Log(list):
    """A journal that keeps its records."""

    write = list.append


def test_order_and_worker_count_change_nothing(graders):
    texts = [str(i / 7) for i in range(20)]
    for workers in (1, 3):
        with pool(graders, "number", workers=workers) as rewards:
            out = scores(rewards, *texts)
        np.testing.assert_array_equal(out.rewards, np.array([float(t) for t in texts], np.float32))
        np.testing.assert_array_equal(out.components["acc"], out.rewards)
        assert out.scored.all() and list(out.components) == ["acc"]


def test_a_failing_grader_leaves_unscored_and_the_others_alone(graders, caplog):
    with pool(graders, "mixed") as rewards:
        out = scores(
            rewards, "fine", "loop", "raise", "exit", "fine", "quit", "sleep", "nan", "none", "huge", "bad", "fine"
        )
        ok = [True, False, False, False, True] + [False] * 6 + [True]
        assert out.scored.tolist() == ok and out.rewards.tolist() == [float(x) for x in ok]
        assert np.isnan(out.components["acc"][~out.scored]).all()
        metrics = rewards.metrics()
        assert metrics["reward/unscored"] == 9 and metrics["reward/retries"] == 9 and metrics["reward/overruns"] == 0
        assert rewards.metrics()["reward/unscored"] == 0
        assert scores(rewards, "fine", prompt="q").rewards.tolist() == [1.0]
    assert all(words in caplog.text for words in ("RuntimeError: broken grader", "status 3", "longer than 1 s"))


def test_the_second_attempt_counts(graders, tmp_path):
    with pool(graders, "mixed") as rewards:
        out = scores(rewards, f"once {tmp_path / 'mark'}")
        assert out.scored.all() and out.rewards.tolist() == [0.5]
        assert rewards.metrics()["reward/retries"] == 1


def test_an_overrun_of_the_judged_program_is_a_verdict(graders):
    with pool(graders, "mixed") as rewards:
        out = scores(rewards, "over", "over 0.25", "fine")
        assert out.scored.all() and out.rewards.tolist() == [0.0, 0.25, 1.0]
        counts = rewards.metrics()
        assert counts["reward/overruns"] == 2 and counts["reward/retries"] == 0


def test_a_late_answer_is_late_though_nobody_looked(graders):
    with pool(graders, "mixed", timeout_s=0.2) as rewards:
        one = rollout("late 0.4")
        rewards.start(one)
        time.sleep(0.8)
        assert not rewards.join(group(one)).scored[0]


def test_components_weights_and_names(graders):
    with pool(graders, "named") as rewards:
        out = scores(rewards, "gold", "x")
    assert {k: v.tolist() for k, v in out.components.items()} == {"acc": [1, 0], "half": [2, 0.5]}
    assert out.rewards.tolist() == [4, 1]
    with pool(graders, "mixed", "named", weights=(1.0, 0.5)) as rewards:
        out = scores(rewards, "gold", "raise")
    assert out.rewards.tolist() == [3, 0] and out.scored.tolist() == [True, False]
    assert {k: v[0] for k, v in out.components.items()} == {
        "acc": 1,
        "mixed/score": 1,
        "named/score": 4,
        "named/acc": 1,
        "named/half": 2,
    }


def test_arguments_go_by_name_and_carry_the_columns(graders):
    with pool(graders, "told") as rewards:
        assert scores(rewards, "x").rewards.tolist() == [1.5]


def test_trls_signature_by_hand(graders):
    with pool(graders, "trl") as rewards:
        assert scores(rewards, "abc", "", "abcdef").rewards.tolist() == [3, 0, 6]
    texts = {(0,): "word", (1,): "asked"}
    with pool(graders, "trl_all", timeout_s=5.0, decode=lambda ids, **how: texts[tuple(ids)]) as rewards:
        one = replace(rollout("word"), tokens=[0])
        rewards.check([one.prompt])
        assert joined(rewards, one).rewards.tolist() == [1.25]
    with pool(graders, "trl_chat") as rewards:
        one = rollout("word")
        one = replace(one, prompt=replace(one.prompt, messages=({"role": "user", "content": "q"},)))
        assert joined(rewards, one).rewards.tolist() == [1.0]


def test_none_does_not_apply(graders):
    """Alone it leaves the rollout unscored, with no second try; among others it is left out of the weighted sum."""
    with pool(graders, "applies") as rewards:
        out = scores(rewards, "2.5", "word")
        assert out.scored.tolist() == [True, False] and out.rewards.tolist() == [2.5, 0]
        assert rewards.metrics()["reward/retries"] == 0
    with pool(graders, "applies", "trl", "named", weights=(10.0, 1.0, 0.5)) as rewards:
        out = scores(rewards, "2.5", "word")
    assert out.scored.all() and out.rewards.tolist() == [25 + 3 + 1.5, 4 + 2]
    assert out.components["applies/score"][0] == 2.5 and np.isnan(out.components["applies/score"][1])
    with pool(graders, "applies", "trl") as rewards:
        assert scores(rewards, "2.5", "word").components["acc"].tolist() == [2.5, 4]


def test_what_is_no_list_of_one_number_is_a_failure(graders, caplog):
    for name in ("wrong_count", "bare_number"):
        with pool(graders, name) as rewards:
            assert not scores(rewards, "x").scored[0]
    assert "it returned a list of 3 for a group of 1 completions" in caplog.text
    assert "must return a list of 1 numbers or None, one per completion; got 1.0" in caplog.text


def test_what_graders_print_goes_to_one_file_of_bounded_size(graders, tmp_path, capfd):
    file = tmp_path / "rewards.log"
    with pool(graders, "talks", timeout_s=20.0, printed=Printed(file)) as rewards:
        assert not file.exists()
        scores(rewards, "one", "two")
    lines = file.read_text().splitlines()
    assert sorted(lines) == sorted(
        f"{word} {n}" for n in ("one", "two") for word in ("said", "complained", "a child said")
    )
    with pool(graders, "talks", timeout_s=20.0, printed=Printed(file, most=len(file.read_text()) + 10)) as rewards:
        assert scores(rewards, *"abcd").scored.all()
    more = file.read_text().splitlines()[len(lines) :]
    assert len(more) <= 2 and more[-1].startswith("... this file holds at most") and capfd.readouterr() == ("", "")


def test_graders_that_print_go_on_where_the_disk_is_full(graders, caplog):
    """Every write to /dev/full fails as on a full disk."""
    with pool(graders, "talks", timeout_s=20.0, printed=Printed("/dev/full")) as rewards:
        for _ in range(2):
            assert scores(rewards, *"abcd").scored.all()
    assert caplog.text.count("what reward functions print is dropped") == 1 and "/dev/full" in caplog.text


def test_an_exception_is_shown_once_with_its_place_and_traceback_and_then_counted(graders, caplog):
    with pool(graders, "deep", timeout_s=20.0) as rewards:
        out = scores(rewards, "a", "x", "y", "z")
        counts = rewards.metrics()
    assert out.scored.tolist() == [True, False, False, False]
    assert counts["reward/exceptions"] == 6 and counts["reward/retries"] == 3
    line = 1 + GRADERS.splitlines().index('    return {"a": 1.0}[text]')
    shown = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(shown) == 1 and f"deep failed at {graders}:{line} on " in shown[0] and "KeyError: '" in shown[0]
    assert "return inner(solution_str)" in shown[0] and "worker.py" not in shown[0] and "<string>" not in shown[0]


def test_a_missing_column_is_said_before_the_run(graders):
    with pool(graders, "number", "needs_level") as rewards:
        good = rollout("1").prompt
        rewards.check([replace(good, extra={"level": 3})])
        with pytest.raises(
            ValueError,
            match="needs_level' needs the column 'level', which prompt 'p' has not; its "
            "columns are ground_truth, answer, data_source, k",
        ):
            rewards.check([good])


def test_workers_are_light_quiet_and_hash_alike(graders, capfd):
    with pool(graders, "clean", "hash_of", workers=2) as rewards:
        out = scores(rewards, *"aaaaaaaa")
    assert (out.components["clean/score"] == 1).all() and len(set(out.components["hash_of/score"].tolist())) == 1
    begun = time.monotonic()
    with pool(graders, "mixed", timeout_s=5.0) as rewards:
        started = time.monotonic() - begun
        scores(rewards, "print")
    assert started < 5.0 and capfd.readouterr().out == ""


def test_shuffle_permutes_training_scores_only_and_keeps_the_truth(graders):
    texts = [str(i) for i in range(12)]
    with pool(graders, "number", shuffle_seed=3, timeout_s=30.0) as rewards:
        first, again = scores(rewards, *texts), scores(rewards, *texts)
        other, later = scores(rewards, *texts, prompt="q"), scores(rewards, *texts, epoch=1)
        held = scores(rewards, *texts, purpose="eval")
    with pool(graders, "number", shuffle_seed=4, timeout_s=30.0) as rewards:
        reseeded = scores(rewards, *texts)
    for out in (first, other, later, reseeded):
        assert sorted(out.rewards.tolist()) == list(range(12)) and out.components["acc"].tolist() == list(range(12))
    np.testing.assert_array_equal(first.rewards, again.rewards)
    assert len({tuple(out.rewards) for out in (first, other, later, reseeded, held)}) == 5
    assert held.rewards.tolist() == list(range(12))


def test_shuffle_leaves_unscored_rollouts_where_they_are(graders):
    with pool(graders, "number", shuffle_seed=0) as rewards:
        out = scores(rewards, "1", "word", "3", "4")
    assert out.scored.tolist() == [True, False, True, True] and sorted(out.rewards[out.scored]) == [1, 3, 4]


def test_the_journal_has_the_true_score_of_every_rollout(graders):
    journal = Log()
    with pool(graders, "number", shuffle_seed=0, journal=journal) as rewards:
        scores(rewards, "1", "2", "x")
    assert [(r["prompt_id"], r["sample"], r["reward"], r["scored"]) for r in journal] == [
        ("p", 0, 1.0, True),
        ("p", 1, 2.0, True),
        ("p", 2, 0.0, False),
    ]
    assert journal[0]["components"] == {"acc": 1.0} and len({r["digest"] for r in journal}) == 3


def test_what_an_earlier_life_journaled_is_joined_and_not_graded_again(graders, tmp_path):
    """A grader that notes each call and raises the second time: only what the journal lacks is asked for. Records,
    scores and counts are those of the first life, a failure's too."""
    (tmp_path / "once.py").write_text(
        textwrap.dedent("""
        import os
        def counting(data_source, solution_str, ground_truth, extra_info):
            with open(CALLS, "a") as file: file.write(solution_str + " ")
            if solution_str == "bad": raise RuntimeError
            return {"score": float(solution_str) / 3, "tens": float(solution_str) * 10}
    """).replace("CALLS", repr(str(tmp_path / "calls")))
    )
    texts = ["1", "bad", "2"]
    rollouts = [rollout(text, i) for i, text in enumerate(texts)]
    fresh = rollout("5", 3)
    seen = []
    for life, members in enumerate((rollouts, [*rollouts, fresh])):
        log, before = Log(), Journaled(seen[0][0] if seen else ())
        how = dict(timeout_s=30.0, journal=log, journaled=before)
        with pool(str(tmp_path / "once.py"), "counting", **how) as rewards:
            for one in [*members, *members[:2]]:  # the last two come again, as those that were taken up once more
                rewards.start(one)
            out = rewards.join(group(*members))
            counts = {k: v for k, v in rewards.metrics().items() if k.startswith("reward/")}
        assert len(before) == 0
        seen.append((log, out, counts))
        if life == 0:
            asked = (tmp_path / "calls").read_text()
    assert (tmp_path / "calls").read_text().removeprefix(asked).split() == ["5"]
    first, second = seen
    assert second[0][:3] == first[0] and second[1].rewards[:3].tobytes() == first[1].rewards.tobytes()
    counted = {"reward/unscored": 1.0, "reward/retries": 1.0, "reward/overruns": 0.0, "reward/broken_workers": 0.0}
    counted["reward/exceptions"] = 2.0
    assert first[2] == second[2] == counted
    np.testing.assert_array_equal(second[1].components["tens"], [10, np.nan, 20, 50])
    assert second[1].scored.tolist() == [True, False, True, True]


def test_a_digest_is_of_the_tokens():
    """8 bytes of BLAKE2b over them as little-endian int32: of as many other tokens it is another."""
    two = [replace(rollout("x"), tokens=[tokens]) for tokens in (5, 6)]
    found = [jobs.digest_of_tokens(one) for one in two]
    assert found == [hashlib.blake2b(bytes([n, 0, 0, 0]), digest_size=8).hexdigest() for n in (5, 6)]


def test_a_rollout_that_comes_again_is_scored_anew(graders):
    with pool(graders, "number") as rewards:
        rewards.start(rollout("1"))
        assert scores(rewards, "2").rewards.tolist() == [2.0]


def test_join_needs_start(graders):
    with pool(graders, "number") as rewards, pytest.raises(ValueError, match="was never started"):
        rewards.join(group(rollout("1")))


@pytest.mark.parametrize(
    "path,words",
    [
        ("jaxrl_post.rewards.math:exakt", "no 'exakt'; nearest is 'exact'"),
        ("jaxrl_post.rewards.maths:exact", "no module 'jaxrl_post.rewards.maths'"),
        ("no_such_package.mod:fn", "no module 'no_such_package'"),
        ("exact", "must be written pkg.mod:fn or file.py:fn"),
        ("missing.py:fn", "there is no file"),
        ("{graders}:short", "does not take the four arguments"),
        ("{graders}:value", "is a int, not a function"),
        ("{graders}:positional", "must take its arguments by name"),
        ("{graders}:state", "needs 'trainer_state', which is not given: a score depends on texts alone"),
        ("{broken}:fn", "cannot be loaded: ZeroDivisionError: division by zero at {broken}:1"),
    ],
)
def test_a_wrong_path_is_one_sentence_at_construction(graders, tmp_path, path, words):
    (tmp_path / "broken.py").write_text("1 / 0")
    path, words = (text.format(graders=graders, broken=tmp_path / "broken.py") for text in (path, words))
    for given in ({}, {"compute": False, "share": lambda vector: vector}):
        with pytest.raises(ValueError, match=words.replace("(", r"\(")) as caught:
            pool(path, workers=1, **given)
        assert "\n" not in str(caught.value)


def test_wrong_settings_are_refused(graders):
    for given, words in (
        (dict(workers=0), "workers=0"),
        (dict(timeout_s=0.0), "timeout_s=0"),
        (dict(weights=(1.0, 2.0)), "2 entries"),
        (dict(compute=False), "needs `share`"),
    ):
        with pytest.raises(ValueError, match=words):
            pool(graders, "number", **given)


def test_close_leaves_no_process_behind(graders):
    rewards = pool(graders, "mixed", workers=3, timeout_s=60.0)
    processes = [worker.process for worker in rewards._workers]
    for i in range(3):
        rewards.start(rollout("loop", i))
    rewards.close()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3
    rewards.close()


def test_what_a_grader_started_dies_with_it(graders, tmp_path):
    note = tmp_path / "pid"
    with pool(graders, "mixed", workers=1, timeout_s=60.0) as rewards:
        rewards.start(rollout(f"child {note}"))
        deadline = time.monotonic() + 30
        while not (note.exists() and note.read_text().endswith("\n")) and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = int(note.read_text())
        assert alive(pid)
    assert_dead([pid])


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"])
def test_workers_die_with_the_run_however_it_ends(graders, end):
    script = textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_rewards_pool as t
        rewards = t.pool({graders!r}, "mixed", workers=2, timeout_s=600.0)
        for i in range(2):
            rewards.start(t.rollout("loop", i))
        print(*[worker.process.pid for worker in rewards._workers], flush=True)
        {end}
        """)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert_dead(pids)


def assert_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kills, retries, unscored", [(4, 0, 0), (5, 1, 0), (6, 1, 1)])
def test_a_worker_that_is_gone_before_it_took_a_task_makes_no_attempt(graders, kills, retries, unscored):
    """Each is killed while nobody looks: the pool still takes it for ready. A task whose processes are all gone is bounded."""
    with pool(graders, "named", workers=1, timeout_s=30.0) as rewards:
        first = rollout("word")
        for kill in range(kills):
            worker = next(iter(rewards._workers))
            if not worker.ready:  # its word that it is comes, and is not read yet
                assert multiprocessing.connection.wait([worker], 30.0)
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
            rewards._workers.turn() if kill else rewards.start(first)
        out, figures = rewards.join(group(first)), rewards.metrics()
    assert out.scored.tolist() == [not unscored] and (figures["reward/retries"], figures["reward/unscored"]) == (
        retries,
        unscored,
    )


@pytest.mark.parametrize("task", [False, True])
def test_a_worker_that_is_killed_while_it_starts_is_started_again(graders, task):
    """Its task was never handed over, so that it is no attempt. One that is killed every time ends the pool."""
    with pool(graders, "named", workers=1, timeout_s=30.0) as rewards:
        first = rollout("word")
        if task:
            rewards.start(first)
        for _ in range(2):
            worker = next(iter(rewards._workers))
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
            rewards._workers.turn(0.5)
        if not task:
            rewards.start(first)
        out, figures = rewards.join(group(first)), rewards.metrics()
        assert out.rewards.tolist() == [4.0] and figures["reward/retries"] <= 1 and figures["reward/unscored"] == 0
        with pytest.raises(RuntimeError, match="cannot be started: the process ended with status -9"):
            for _ in range(8):
                os.kill(next(iter(rewards._workers)).process.pid, signal.SIGKILL)
                next(iter(rewards._workers)).process.wait()
                rewards._workers.turn(0.5)
