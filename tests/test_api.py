"""jaxrl_post.train, load and evaluate: the run of the command, its bits again without a learner, and figures by hand."""

import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxrl_post
from jaxrl_post import main as command
from jaxrl_post.commands import evaluate as evaluate_command
from jaxrl_post.commands import generate as generate_command
from jaxrl_post.config import default
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch.parts import saved_policy
from jaxrl_post.ring.types import Sampling
from jaxrl_post.runs import metric_rows, rollout_log

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    {
        "id": f"{a}+{b}",
        "prompt": f"{a}+{b}=",
        "data_source": f"of {a % 2}",
        "reward_model": {"ground_truth": str(a + b)},
    }
    for a in range(4)
    for b in range(4)
]
TRAIN, HELD_OUT = ROWS[:12], ROWS[12:]


def settings(here):
    c = default()
    c.name, c.steps, c.run_dir = "toy", 3, str(here / "runs")
    c.model.preset, c.model.tokenizer = "tiny", str(here / "tokenizer")
    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 8, 32, 8, (32,)
    c.engine.steps_per_dispatch = 4
    c.sampling.max_tokens = 8
    c.scheduler.prompts, c.scheduler.group_size = 4, 4
    c.batch.rows, c.batch.tokens, c.optimizer.lr = 4, 64, 1e-2
    c.eval.prompts, c.eval.samples, c.checkpoint.every = 4, 2, 1
    return c


def grader():
    """A function that no other process can import, with a value of its own."""
    wanted = set("02468")

    def even(data_source, solution_str, ground_truth, extra_info):
        return {"score": sum(c in wanted for c in solution_str) / 8, "acc": float(solution_str[:1] < "4")}

    return even


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    characters("0123456789+=").save(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def trained(here):
    """The run, the rows that its callback saw, and what was set in this process before and after."""
    seen, set_before = [], _set()
    run = jaxrl_post.train(
        settings(here), grader(), TRAIN, seen.append, held_out=HELD_OUT, folder=here / "run", eval__show=0
    )
    return run, seen, (set_before, _set())


def _set():
    """What of this process a run could leave changed."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_transfer_guard")
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    return [getattr(jax.config, name) for name in names], handlers


def test_a_run_returns_its_metrics_rollouts_and_policy(here, trained):
    run, seen, (before, after) = trained
    assert run.folder == here / "run" and (run.policy / "model.safetensors").is_file()
    assert before == after
    assert run.metrics["step"] == [1, 2, 3] and all(len(column) == 3 for column in run.metrics.values())
    assert run.evaluations["step"] == [0, 3]
    on_file = metric_rows.read(run.folder / "metrics.jsonl")
    assert [row["step"] for row in seen] == [row["step"] for row in on_file] == [0, 1, 2, 3, 3]
    assert [row["critic/score/mean"] for row in seen if "critic/score/mean" in row] == run.metrics["critic/score/mean"]
    assert len(run.rollouts) == 3 * 16
    for row in run.rollouts:
        assert row["reward"] == pytest.approx(sum(c in "02468" for c in row["text"]) / 8)
        assert row["components"]["acc"] == float(row["text"][:1] < "4")
    told = json.loads((run.folder / "config.json").read_text())
    assert told["reward"]["functions"] == ["python:even"] and told["data"]["train"] == "python:data.train"


def test_again_in_one_process_and_by_the_command_bits_are_equal(here, trained, capsys):
    run, _, _ = trained
    again = jaxrl_post.train(settings(here), [grader()], TRAIN, held_out=HELD_OUT, folder=here / "again", eval__show=0)
    (here / "reward.py").write_text(
        "def even(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': sum(c in '02468' for c in solution_str) / 8, 'acc': float(solution_str[:1] < '4')}\n"
    )
    for name, rows in (("train", TRAIN), ("eval", HELD_OUT)):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    c = settings(here)
    c.data.train, c.eval.data = f"{here}/train.jsonl", f"{here}/eval.jsonl"
    c.reward.functions = (f"{here}/reward.py:even",)
    (here / "toy.py").write_text("from jaxrl_post.config import default\n\n\ndef get_config():\n    c = default()\n")
    with open(here / "toy.py", "a") as file:
        file.write(f"    c.update({c.to_dict()!r})\n    return c\n")
    assert command.main([f"--config={here / 'toy.py'}", f"--run-dir={here / 'command'}"]) == 0
    for other in (again.folder, here / "command"):
        assert _weights(other) == _weights(run.folder)
        for step in (1, 2, 3):
            ours, theirs = (_rollouts(folder, "rollouts", step) for folder in (run.folder, other))
            assert [(r.tokens.tolist(), r.logprobs.tolist()) for r in ours] == [
                (r.tokens.tolist(), r.logprobs.tolist()) for r in theirs
            ]


def _weights(folder):
    return (folder / "policy" / "model.safetensors").read_bytes()


def _rollouts(folder, kind, step):
    groups = rollout_log.read(folder / kind / f"step_{step:06d}.npz")
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.fixture(scope="module")
def policy(trained):
    return jaxrl_post.load(trained[0].folder)


def test_a_policy_repeats_the_rollouts_of_a_run_bit_for_bit(trained, policy):
    """Those that training sampled at a saved step, and those of the last evaluation, greedy ones too."""
    run = trained[0]
    saved = jaxrl_post.load(f"{run.folder}@2")
    for source, opened, kind, law in (
        (_rollouts(run.folder, "rollouts", 3), saved, "train", {}),
        (_rollouts(run.folder, "evaluations", 3)[:8], policy, "eval", {}),
        (_rollouts(run.folder, "evaluations", 3)[8:], policy, "eval", {"temperature": 0.0}),
    ):
        assert source and {rollout.id.purpose for rollout in source} == {kind}
        keys = np.array([[rollout.id.seed()] for rollout in source])
        got = opened.generate([rollout.prompt.tokens.tolist() for rollout in source], 1, law, keys)
        for (one,), rollout in zip(got, source, strict=True):
            assert one.tokens.tolist() == rollout.tokens.tolist()
            assert one.logprobs.tobytes() == rollout.logprobs.tobytes() and one.finish == rollout.finish.value


def test_a_policy_that_learnt_written_completions_reads_prompts_without_them(here, trained):
    copy = here / "learnt"
    shutil.copytree(trained[0].folder / "policy", copy / "policy")
    told = json.loads((trained[0].folder / "config.json").read_text())
    told["data"]["columns"] = {"id": "prompt_id", "completion": "text"}
    (copy / "config.json").write_text(json.dumps(told))
    config, _ = saved_policy.files(copy)
    assert config.data.columns == {"id": "prompt_id"}


def test_the_weights_of_another_step_sample_otherwise(trained, policy):
    run = trained[0]
    first = jaxrl_post.load(f"{run.folder}@1")
    assert any(
        a[0].logprobs.tobytes() != b[0].logprobs.tobytes()
        for a, b in zip(first.generate(["1+2=", "3+3="]), policy.generate(["1+2=", "3+3="]))
    )


def test_scored_tokens_have_the_log_probs_of_sampling(policy):
    """Bit for bit; and over all tokens of a place the law sums to 1."""
    prompts = ["1+2=", "3+3=", "0+1="]
    for law in ({}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 3}):
        got = policy.generate(prompts, 3, law, seeds=5)
        assert law.get("temperature") == 0.0 or len({one.text for many in got for one in many}) > 1
        scored = policy.logprobs(prompts, got, law)
        for many, values in zip(got, scored, strict=True):
            assert [one.logprobs.tobytes() for one in many] == [value.tobytes() for value in values]
    every = [[token] for token in range(policy.tokenizer.vocab_size)]
    (whole,) = policy.logprobs(["1+2="], [[[4, 5, *one] for one in every]])
    last = np.array([value[2] for value in whole])
    assert len({value[:2].tobytes() for value in whole}) == 1  # of the two tokens before
    assert np.exp(last).sum() == pytest.approx(1.0, abs=1e-5) and np.isfinite(last).all()
    (cut,) = policy.logprobs(["1+2="], [[[4, 5, *one] for one in every]], {"top_k": 2})
    allowed = np.isfinite([value[2] for value in cut])
    assert allowed.sum() == 2 and set(np.argsort(last)[-2:]) == set(np.flatnonzero(allowed))


def test_texts_ids_and_completions_of_every_form_score_alike(policy):
    ids = policy.tokenizer.encode("12+", special=False)
    text, numbers = policy.logprobs(["1+2=", policy.tokenizer.encode("1+2=")], ["12+", ids])
    assert text.tobytes() == numbers.tobytes() and text.shape == (3,)
    assert policy.logprobs("1+2=", "12+")[0].tobytes() == text.tobytes()
    assert policy.logprobs(["1+2="], [[]]) == [[]]
    assert policy.logprobs(["1+2="], [""])[0].shape == (0,)


def test_noise_is_of_the_seed_the_place_and_the_sample(policy):
    one, same, other = (policy.generate(["1+2=", "1+2="], 2, seeds=seed) for seed in (3, 3, 4))
    texts = [[[g.text for g in many] for many in got] for got in (one, same, other)]
    assert texts[0] == texts[1] != texts[2] and len({text for many in texts[0] for text in many}) > 1


def test_an_evaluation_is_that_of_the_run_and_its_figures_are_computed_by_hand(trained, policy):
    run = trained[0]
    found = jaxrl_post.evaluate(policy, HELD_OUT, [grader()], 2)
    theirs = rollout_log.read(run.folder / "evaluations" / "step_000003.npz")[:4]
    for ours, group in zip(found.groups, theirs, strict=True):
        assert [r.tokens.tolist() for r in ours.rollouts] == [r.tokens.tolist() for r in group.rollouts]
        assert ours.rewards.tolist() == group.rewards.tolist()
    found = jaxrl_post.evaluate(policy, ROWS, [grader()], 4, sampling={"top_p": 0.9})
    right = {"all": []} | {source: [] for source in ("of 0", "of 1")}
    for group in found.groups:
        texts = [policy.tokenizer.decode(rollout.tokens) for rollout in group.rollouts]
        marks = [text[:1] < "4" for text in texts]
        right["all"].append(marks)
        right[group.prompt.source].append(marks)
    assert sorted(found.sources) == ["of 0", "of 1"]
    for name, marks in right.items():
        figures = found.figures if name == "all" else found.sources[name]
        assert figures["avg"] == pytest.approx(np.mean(marks)) and figures["prompts"] == len(marks)
        low, high = figures["avg_interval"]
        assert low <= figures["avg"] <= high
        for k in range(1, 5):  # the share of all sets of k rollouts that have a right one
            sets = [[any(chosen) for chosen in itertools.combinations(one, k)] for one in marks]
            assert figures["pass_at"][k] == pytest.approx(np.mean([np.mean(one) for one in sets]))
    json.dumps(found.to_dict())


def test_a_run_goes_on_only_with_the_same_function_and_rows(here, trained):
    run, folder = trained[0], here / "half"
    given = dict(held_out=HELD_OUT, folder=folder, eval__show=0)
    jaxrl_post.train(settings(here), [grader()], TRAIN, steps=2, **given)

    def even(data_source, solution_str, ground_truth, extra_info):
        return 0.0

    for rewards, rows, words in (
        ([even], TRAIN, "reward_code.python:even"),
        ([grader()], [*TRAIN[1:], TRAIN[0] | {"prompt": "9+9="}], "data.train.digest"),
    ):
        with pytest.raises(ValueError, match=f"resume refused: .*{words}"):
            jaxrl_post.train(settings(here), rewards, rows, resume=True, **given)
    with pytest.raises(ValueError, match="'python:data.train' is the rows of a Python program"):
        told = json.loads((folder / "config.json").read_text())
        jaxrl_post.train({name: told[name] for name in told if name != "derived"}, folder=folder, resume=True)
    done = jaxrl_post.train(settings(here), [grader()], TRAIN, resume=True, **given)
    assert _weights(done.folder) == _weights(run.folder) and done.metrics["step"] == [1, 2, 3]


def test_an_interrupt_and_a_callback_that_raises_end_a_run_which_then_goes_on(here, trained):
    def interrupt(row):
        if row["step"] == 1:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def refuse(row):
        raise RuntimeError(f"enough at {row['step']}")

    given = dict(held_out=HELD_OUT, folder=here / "ended", eval__show=0, resume=True)
    before = _set()
    with pytest.raises(KeyboardInterrupt, match="SIGINT: stopped after step [12]"):
        jaxrl_post.train(settings(here), [grader()], TRAIN, [interrupt], **given)
    with pytest.raises(RuntimeError, match="enough at [23]"):
        jaxrl_post.train(settings(here), [grader()], TRAIN, [refuse], **given)
    assert _set() == before
    done = jaxrl_post.train(settings(here), [grader()], TRAIN, **given)
    assert _weights(done.folder) == _weights(trained[0].folder) and done.metrics["step"] == [1, 2, 3]


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"config": 3}, "config must be a path, the result of jaxrl_post.config.default() or dicts, got int"),
        ({"config": "nowhere.py"}, "--config='nowhere.py': no such Python file"),
        ({"optimizer__lrr": 1.0}, "unknown name 'optimizer.lrr'; nearest valid name is 'optimizer.lr'"),
        ({"overrides": ["optimizer.lr=-1"]}, "optimizer.lr=-1"),
        ({"resume": True}, "resume=True says not which run"),
        ({"rewards": [3]}, "'3' is a int, neither a function nor a path"),
        ({"rewards": ["nowhere:score"]}, "there is no module 'nowhere'"),
        ({"rewards": [lambda text: 1.0]}, "does not take the four arguments"),
        ({"data": 3}, "data.train must be rows, a path or task:NAME, got a int"),
        ({"data": []}, "has no rows: give at least one"),
        ({"data": [{"text": "1+1="}]}, "python:data.train, row 1"),
        ({"data": [{"prompt": "1+1=", "note": {1}}]}, "row 1, column 'note': holds a set, which no"),
        ({"callbacks": [3]}, "callbacks must be functions, got 3, a int"),
        ({"callbacks": 3}, "callbacks must be one alone or a list, got 3, a int"),
        ({"callbacks": "print"}, "callbacks must be functions, got 'print', a str"),
        ({"rewards": 3}, "rewards must be one alone or a list, got 3, a int"),
        (
            {"rewards": {"even": "own.py:even"}},
            "rewards must be one alone or a list, got {'even': 'own.py:even'}, a dict",
        ),
        ({"data": {"prompt": "1+1=", "answer": "2"}}, "data.train must be rows, a path or task:NAME, got a dict"),
        ({"data": ["1+1="]}, "data.train: each row must be a dict, and row 1 of the list is a str"),
        ({"data": [{"prompt": "1+1=", "answer": "2"}, {"prompt": "x", "answer": "2"}]}, "python:data.train, row 2"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_folder(here, changed, sentence):
    given = {"config": settings(here), "rewards": [grader()], "data": TRAIN} | changed
    if "resume" not in changed:
        given["folder"] = here / "wrong"
    with pytest.raises(ValueError) as error:
        jaxrl_post.train(**given)
    assert sentence in str(error.value) and not (here / "wrong").exists()


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda p, run: jaxrl_post.load("/nowhere"), "there is no folder or file /nowhere"),
        (lambda p, run: jaxrl_post.load(f"{run}@9"), "has no whole step 9; its saved steps are 1, 2, 3"),
        (lambda p, run: jaxrl_post.load(f"{run}@x"), "must be a whole number, got 'x'"),
        (lambda p, run: jaxrl_post.load(f"{run}/policy@1"), "is no folder of a run"),
        (lambda p, run: jaxrl_post.load(run, engine__max_length=10**6), "engine.max_length=1000000"),
        (lambda p, run: jaxrl_post.load(run, optimizer__lr=0.1), "the option 'optimizer__lr' changes nothing here"),
        (lambda p, run: p.generate(["1+1="], 0), "n=0 must be at least 1"),
        (lambda p, run: p.generate(["1+1="], sampling={"temprature": 1}), "nearest is 'temperature'"),
        (lambda p, run: p.generate(["1+1="], max_tokens=99), "the largest valid max_tokens is 28"),
        (lambda p, run: p.generate(["x"]), "prompts[0]"),
        (lambda p, run: p.generate([[1.5]]), "prompts[0]: must be a text, messages or a list of token ids"),
        (lambda p, run: p.generate([[99]]), "token outside 0..13"),
        (lambda p, run: p.generate([[{"role": "user", "content": "1"}]]), "no chat template"),
        (
            lambda p, run: p.generate(["1+1="], 2, seeds=np.zeros((1, 2))),
            "seeds must be a whole number or uint32[1, 2, 2]",
        ),
        (lambda p, run: p.logprobs(["1+1="], ["1", "2"]), "2 completions for 1 prompts"),
        (lambda p, run: jaxrl_post.evaluate(p, [], grader()), "has no rows"),
        (lambda p, run: jaxrl_post.evaluate(p, "task:smus", [grader()]), "there is no task 'smus'"),
    ],
)
def test_mistakes_with_a_policy_are_one_sentence(trained, policy, call, sentence):
    with pytest.raises(ValueError) as error:
        call(policy, trained[0].folder)
    assert sentence in str(error.value)


def test_a_law_of_ones_own_has_no_ends_but_its_own(policy):
    (free,), (own,) = policy.generate(["1+2="], 1, Sampling(temperature=2.0)), policy.generate(["1+2="], 1, {}, 0, 2)
    assert len(free[0].tokens) == 8 and free[0].finish == "length" and len(own[0].tokens) <= 2


def test_the_commands_print_and_write_what_the_functions_return(here, trained, policy, capsys):
    run, file = trained[0], here / "told.json"
    (here / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (here / "own.py").write_text(
        "def first(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str[:1] < '4')\n"
    )
    words = ["--policy", str(run.folder), "--data", f"{here}/all.jsonl", f"--rewards={here}/own.py:first"]
    assert evaluate_command.main([*words, "--samples=3", "--temperature", "0.7", f"--json={file}"]) == 0
    told, shown = json.loads(file.read_text()), capsys.readouterr().out
    found = jaxrl_post.evaluate(policy, ROWS, [f"{here}/own.py:first"], 3, sampling={"temperature": 0.7})
    assert told["all"] == json.loads(json.dumps(found.figures)) and told["sources"].keys() == {"of 0", "of 1"}
    assert f"pass@3 {found.figures['pass_at'][3]:.4f}" in shown and f"avg@3 {found.figures['avg']:.4f}" in shown
    assert (
        generate_command.main(
            ["--policy", f"{run.folder}@3", "--prompt=1+2=", "--prompt", "3+3=", "--n", "2", f"--json={file}"]
        )
        == 0
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    want = [one for many in policy.generate(["1+2=", "3+3="], 2) for one in many]
    assert [(row["text"], row["tokens"], row["finish"]) for row in rows] == [
        (one.text, one.tokens.tolist(), one.finish) for one in want
    ]
    assert all(
        math.isclose(a, b) for row, one in zip(rows, want) for a, b in zip(row["logprobs"], one.logprobs.tolist())
    )
    assert want[0].text in capsys.readouterr().out


def test_a_policy_of_a_run_is_scored_by_the_rewards_of_the_run(here, trained, policy):
    told = json.loads((trained[0].folder / "config.json").read_text())["reward"]
    assert told["functions"] == ["python:even"]
    with pytest.raises(ValueError, match="'python:even' is a function of the program that began the run"):
        jaxrl_post.evaluate(policy, HELD_OUT)
    (here / "own.py").write_text(
        "def first(data_source, solution_str, ground_truth, extra_info):\n    return 1.0 + len(solution_str)\n"
    )
    named = [f"{here}/own.py:first"]
    opened = jaxrl_post.load(trained[0].folder, [f"reward.functions={named}", "reward.weights=(3.0,)"])
    own, given = jaxrl_post.evaluate(opened, HELD_OUT, n=2), jaxrl_post.evaluate(policy, HELD_OUT, named, n=2)
    assert own.figures["reward"] == 3 * given.figures["reward"] > 0  # with the run's weights
    assert own.figures["avg"] == given.figures["avg"]
    free = jaxrl_post.load(trained[0].folder, ["reward.functions=()"])
    with pytest.raises(ValueError, match="the policy is of no run whose rewards could be used"):
        jaxrl_post.evaluate(free, HELD_OUT)


@pytest.mark.parametrize(
    "command, arguments, sentence",
    [
        (evaluate_command, ["--policy=x"], "the following arguments are required: --data; write"),
        (evaluate_command, ["--polcy=x"], "unknown argument '--polcy=x'; nearest is --policy"),
        (evaluate_command, ["--policy=x", "--policy=y"], "--policy is given twice, with 'x' and 'y'"),
        (
            evaluate_command,
            ["--policy=x", "--data=y", "--samples=two"],
            "argument --samples: 'two' must be a whole number of at least 1",
        ),
        (generate_command, ["--policy=x"], "give prompts by --prompt TEXT"),
        (generate_command, ["--policy=/nowhere", "--prompt=1"], "there is no folder or file /nowhere"),
        (generate_command, ["--policy=x", "--prompt=1", "--json=https://x"], "--json"),
    ],
)
def test_mistakes_of_a_command_line_are_one_sentence(command, arguments, sentence, capsys):
    assert command.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and sentence in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["evaluate", "generate"])
def test_help_needs_no_jax_and_nothing_is_imported_before_it_is_used(name):
    code = (
        "import sys, jaxrl_post, jaxrl_post.ring.types\n"
        "assert {'train', 'load', 'evaluate'} <= set(dir(jaxrl_post)) and not hasattr(jaxrl_post, 'trian')\n"
        "from jaxrl_post.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "sys.exit(sum(name in sys.modules for name in ('jax', 'flax', 'optax')))"
    )
    done = subprocess.run([sys.executable, "-c", code, name, "--help"], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0 and f"jaxrl_post {name} --policy".encode() in done.stdout, done.stderr.decode()
