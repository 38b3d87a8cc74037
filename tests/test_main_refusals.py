# ruff: noqa: F811  the fixture `here` is that of test_main
"""The command: a mistake is one sentence and exit code 1, and a plan writes nothing."""

import dataclasses
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
import safetensors.numpy
from test_main import go, here  # noqa: F401

from jaxrl_post import main as command
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch import command_line
from jaxrl_post.launch.parts import graders
from jaxrl_post.launch.plan import memory_plan
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_a_file_of_the_start_that_cannot_be_written_is_one_sentence(here, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "metrics.jsonl")

    monkeypatch.setattr(graders, "both", refuse)
    assert go(here) == 1
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'metrics.jsonl'\n"
    assert not list(here.glob("runs/*"))


def test_a_log_that_cannot_be_written_is_one_sentence(monkeypatch, capsys):
    def refuse(run):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(command, "assemble", lambda *_: types.SimpleNamespace())
    monkeypatch.setattr(command, "run_training", refuse)
    assert command.main([]) == 1
    said = "No space left on device: 'metrics.jsonl'; mend that, and --resume continues from the newest checkpoint"
    assert capsys.readouterr().err == f"error: [Errno 28] {said}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.extended)])
def test_a_signal_while_modules_are_imported_says_resume_me(number):
    words = [sys.executable, "-X", "importtime", "-m", "jaxrl_post.main", "--config=configs/demo.py", "--dry-run"]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(words, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        next(line for line in run.stderr if "jax._src" in line)
        run.send_signal(number)
        said = run.stderr.read()
    assert run.returncode == 42 and "Traceback" not in said


def test_flags():
    flags = command_line.parse(
        ["--config=a.py", "--config.steps=3", "--dry-run", "--config.model.path=x=y", "--run-dir=r"]
    )
    assert flags == command_line.Flags(
        config="a.py", overrides=("steps=3", "model.path=x=y"), dry_run=True, run_dir="r"
    )


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--config.scheduler.promts=3", "unknown name 'scheduler.promts'; nearest valid name is 'scheduler.prompts'"),
        ("--config.scheduler.group_size=1", "scheduler.group_size=1 must be at least 2"),
        ("--dryrun", "unknown argument '--dryrun'; nearest is --dry-run"),
        ("--run-dir=", "unknown argument '--run-dir='; nearest is --run-dir=FOLDER"),
        ("--config.model.preset=tinny", "model.preset='tinny' is not one of"),
        ("--config.model.tokenizer=/nowhere", "there is no tokenizer at /nowhere"),
        ("--config.model.path=/nowhere", "model.path='/nowhere' and model.preset='tiny' are both given"),
        (
            "--config.sampling.stop_ids=[99]",
            "sampling.stop_ids: 99 is no token of the tokenizer; the nearest valid value is",
        ),
        ("--config.sampling.stop_ids=[1,2,3,4,5,6,7,8,9]", "at most 8 can end a rollout"),
        ("--config.data.train=/nowhere.jsonl", "there is no file /nowhere.jsonl"),
        ("--config.eval.data=", "name a file of held-out prompts, or set eval.prompts=0"),
        ("--config.eval.data=HERE/train.jsonl", "share 6 prompts, the first is '0+0'"),
        ("--config.sampling.max_tokens=30", "the prompt has 4 tokens; it must have 1 to 2"),
        ("--config.engine.max_length=9999", "engine.max_length=9999"),
        (
            "--config.mesh.tensor=4",
            "mesh.tensor=4 does not divide the model's kv_heads=2; the nearest valid value is 2",
        ),
        ("--config.mesh.data=32", "batch.rows=4 must be a multiple of mesh.data*mesh.fsdp*mesh.expert=32"),
        ("--config.reward.functions=['nowhere.x:y']", "there is no module 'nowhere'"),
        ("--config.engine.cost_table=/nowhere.json", "engine.cost_table=/nowhere.json: no such file; write one with"),
        (
            "--config.run_dir=HERE/reward.py/runs",
            "run_dir=HERE/reward.py/runs: Not a directory (HERE/reward.py/runs): name a",
        ),
        ("--run-dir=HERE/reward.py/run", "--run-dir=HERE/reward.py/run: Not a directory"),
        ("--run-dir=HERE/toy.py", "toy.py exists already and is not an empty folder: a run is never written over"),
        (
            "--config.model.tokenizer=HERE/broken.json",
            "broken.json is a tokenizer.json that the tokenizers library does not",
        ),
        ("--config.eval.at=[2,4]", "eval.at=(2, 4): 4 is never reached: it must be at least 0 and at most steps=3"),
        ("--config.optimizer.warmup_steps=9", "optimizer.warmup_steps=9 is above the run's steps=3"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(here, capsys, flag, sentence):
    _mistaken(here, capsys, sentence, flag)


def _mistaken(here, capsys, sentence, *flags):
    """Starts a run with a mistake: its one line of an error has the sentence, nothing is compiled, and no folder is left."""
    watching, compiled = [True], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **labels: compiled.append(labels) if watching and "backend_compile" in event else None
    )
    assert go(here, *(flag.replace("HERE", str(here)) for flag in flags)) == 1
    watching.clear()
    assert not compiled, "something was compiled before the mistake was found"
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n")
    assert sentence.replace("HERE", str(here)) in said
    assert not list(here.glob("runs/*"))


ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def models(here):
    """Folders of models with experts that are not read."""
    shape = dataclasses.replace(PRESETS["tiny_moe"], vocab_size=characters("0123456789+=").vocab_size)
    changed = {
        "deepseek": dict(architectures=["DeepseekV3ForCausalLM"], n_group=8, topk_group=4, scoring_func="sigmoid"),
        "glm": dict(architectures=["Glm4MoeForCausalLM"], n_group=1, topk_group=1),
        "quantised": dict(quantization_config={"quant_method": "fp8", "fmt": "e4m3"}),
        "router": {},
    }
    for name, keys in changed.items():
        hf.save(here / name, shape, decoder.init(shape, 0), tokenizer_files=(here / "tokenizer").iterdir())
        told = json.loads((here / name / "config.json").read_text())
        (here / name / "config.json").write_text(json.dumps(told | keys))
    weights = safetensors.numpy.load_file(here / "router" / "model.safetensors")
    weights[ROUTER] = weights[ROUTER][:7].copy()
    safetensors.numpy.save_file(weights, here / "router" / "model.safetensors")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            "preset=tiny_moe mesh.expert=3 batch.rows=6",
            "mesh.expert=3 does not divide the model's expert=8; the nearest",
        ),
        ("preset=tiny_moe", "error: sampling.keep_routes=True: records of 16 rollouts of 8 tokens take"),
        ("path=HERE/router", f"tensor {ROUTER} has shape (7, 32), expected (8, 32)"),
        (
            "path=HERE/deepseek",
            "DeepseekV3ForCausalLM is not read: its router chooses experts by sigmoid scores or in groups",
        ),
        ("path=HERE/glm", "Glm4MoeForCausalLM is not read: its router chooses experts by sigmoid scores or in groups"),
        ("path=HERE/quantised", "are not read for qwen3_moe; the nearest valid choice is a copy in bfloat16"),
    ],
)
def test_a_mistake_about_experts_is_one_sentence(here, models, monkeypatch, capsys, flags, sentence):
    if "records" in sentence:
        monkeypatch.setattr(memory_plan, "of_host", lambda: 100)
    model, *others = flags.split()
    given = ["model.preset=", f"model.{model}", *others]
    _mistaken(here, capsys, sentence, *(f"--config.{one}" for one in given))


SUPERVISED = (
    "--config.engine.name=demonstrations",
    "--config.algorithm.loss_mode=sft",
    "--config.algorithm.adv_estimator=ones",
    "--config.scheduler.group_size=1",
    "--config.eval.data=",
)


def test_a_demonstration_that_is_too_long_is_found_before_anything_is_compiled(here, capsys):
    """Of a file the longest row; of a task whose demonstrations differ by seed the longest of any seed."""
    rows = [
        {"id": str(n), "prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2" * n}}
        for n in (3, 8)
    ]
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*SUPERVISED, f"--config.eval.data={here / 'eval.jsonl'}"]
    assert go(here, *flags, f"--config.data.train={here / 'long.jsonl'}") == 1
    assert (
        "the demonstration of prompt '8' has 9 tokens with its end, more than sampling.max_tokens=8; the nearest "
        "valid value is 9" in capsys.readouterr().err
    )
    characters("0123456789+=#").save(here / "tasks_tokenizer")
    flags += [
        f"--config.model.tokenizer={here / 'tasks_tokenizer'}",
        "--config.data.train=task:sums",
        "--config.data.size=16",
        "--config.data.task.careful=0.001",
        "--config.data.task.usual=3",
        "--config.data.task.longest=4",
        "--config.data.task.tail=0.0",
    ]
    assert go(here, *flags) == 1  # "10+2+3=" becomes "12+3=15#15": 9 characters or more, where a guess is "#15"
    assert "more than sampling.max_tokens=8" in capsys.readouterr().err and not list(here.glob("runs/*"))


@pytest.mark.extended
def test_graders_that_fail_on_everything_end_the_first_round(here, capsys):
    (here / "broken.py").write_text(
        "def broken(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n"
    )
    flags = [
        f"--config.reward.functions=['{here / 'broken.py'}:broken']",
        "--config.scheduler.prompts=2",
        "--config.scheduler.group_size=2",
        "--config.eval.prompts=1",
        "--config.eval.samples=1",
    ]
    for name, more, words in (
        ("untrained", ["--config.eval=default", "--config.eval.prompts=0"], "training: none of the first 2 groups' 4"),
        ("unevaluated", [], "evaluation: none of 2"),
    ):
        folder = here / name
        assert go(here, f"--run-dir={folder}", *flags, *more) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and f"{words} rollouts could be scored" in said
        assert not (folder / "policy").exists()
    # mended, the run goes on where it was: what failed is asked again
    (here / "broken.py").write_text(
        "def broken(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    assert (
        go(
            here,
            f"--run-dir={here / 'untrained'}",
            "--resume",
            *flags,
            "--config.eval=default",
            "--config.eval.prompts=0",
        )
        == 0
    )


def test_no_config_at_all(capsys):
    assert command.main([]) == 1
    said = capsys.readouterr().err
    assert said == (
        "error: no config file: write --config=FILE, for example --config=configs/demo.py, or --resume=RUN to continue a run\n"
    )


def test_a_dry_run_prints_the_plan_and_writes_nothing(here, capsys):
    """Of a run for more devices than there are, too."""
    before, more = sorted(here.rglob("*")), ("--config.mesh.fsdp=16", "--config.batch.rows=16", "--config.steps=45")
    assert go(here, "--dry-run", *more) == 0
    short = capsys.readouterr().out
    assert go(here, "--dry-run=all", *more) == 0
    said = capsys.readouterr().out
    start, end = said.index("{"), said.rindex("}") + 1
    resolved = json.loads(said[start:end])
    assert (
        resolved["mesh"]
        == {
            "data": 1,
            "fsdp": 16,
            "expert": 1,
            "tensor": 1,
            "engine": 0,
            "engine_tensor": 0,
            "engine_expert": 0,
            "context": 1,
        }
        and resolved["steps"] == 45
    )
    assert said[end:].strip() == short[short.index("Batch\n") :].strip()
    told = {line.split()[0]: line.split()[1:] for line in short.partition("Batch\n")[0].splitlines()[1:]}
    assert told["mesh.fsdp"] == ["16", "(default", "1)"] and told["steps"] == ["45", "(default", "10)"]
    assert "sampling.top_p" not in told and "sampling.top_p" not in short
    rows = dict(line.strip().rsplit("  ", 1) for line in said[end:].splitlines() if line.startswith("  "))
    plan = {name.strip(): value.strip() for name, value in rows.items()}
    assert plan["rollouts per round"] == "16" and plan["engine slots in all"] == "128" and plan["epochs"] == "2.0"
    assert "Weights reach the engine: relayout" in said
    assert "Memory of the process: not known here: the run's 16 devices are needed" in said
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ]


def test_what_is_not_set_follows_the_platform_or_the_run_that_goes_on(here, tmp_path, capsys, monkeypatch):
    def resolved(*flags):
        assert go(here, "--dry-run=all", "--config.mesh.fsdp=16", "--config.batch.rows=16", *flags) == 0
        told = capsys.readouterr().out
        found = json.loads(told[told.index("{") : told.rindex("}") + 1])
        return found["model"]["compute_dtype"], found["engine"]["dtype"], found["engine"]["page_size"]

    assert resolved() == ("float32", "float32", 8)
    (tmp_path / "config.json").write_text(
        '{"model": {"compute_dtype": "float32"}, "engine": {"dtype": "float32", "page_size": 16}}'
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    unset = "--config.engine.page_size=auto"
    assert resolved() == ("bfloat16", "bfloat16", 8) and resolved(unset) == ("bfloat16", "bfloat16", 64)
    assert resolved(unset, f"--resume={tmp_path}") == ("float32", "float32", 16)


def test_a_dry_run_refuses_what_a_run_would(here, tmp_path, capsys):
    path = tmp_path / "lacking.jsonl"
    path.write_text(json.dumps({"prompt": "11+1=", "answer": None}) + "\n")
    assert go(here, "--dry-run", f"--config.data.train={path}") == 1
    assert "lacking.jsonl, line 1: column 'answer' is null, but reward function" in capsys.readouterr().err
    assert go(here, "--dry-run", "--config.reward.functions=['nowhere.x:y']") == 1
    assert "there is no module 'nowhere'" in capsys.readouterr().err


@pytest.mark.extended
def test_a_dry_run_says_what_the_process_will_hold_and_makes_no_weights(here, capsys, monkeypatch):
    for name in ("put", "_place"):
        monkeypatch.setattr(mesh, name, lambda *_: pytest.fail("a plan places nothing"))
    assert go(here, "--dry-run", "--config.mesh.fsdp=2", "--config.engine.dtype=bfloat16") == 0
    said = capsys.readouterr().out
    table = said[said.index("Memory of the process (cpu, 2 devices)") :].splitlines()[1:]
    rows = {line.rsplit("  ", 1)[0].strip(): float(line.split()[-2].replace(",", "")) for line in table}
    *parts, (name, highest) = rows.items()
    assert name == "process at its highest" and highest == pytest.approx(sum(size for _, size in parts), abs=0.5)
    assert rows["process itself (compiled, no weights yet)"] > 100
    assert any(name.startswith("largest program beside it (") for name in rows)
