"""Mistakes of every day: names, flags, data, runs that are resumed or branched, and settings that nothing would read.

CASES is what the show no-silent-mistakes runs. A case is a dict:

- name: what is wrong.
- files: path and text of each file in a folder that is otherwise empty.
- before: commands that are run there first, each a list of arguments behind `python`.
- argv: arguments behind `python`, with the folder as the working directory.
- says: a regular expression that the one line on stderr, `error: ...`, has a match of.
- code: the exit code.
- may_appear: patterns of files that the command may leave. All others stay as they were, and none appears.
"""

from __future__ import annotations

import json

RUN = ("-m", "jaxrl_post.main")
LETTERS = "0123456789+="


def _tokenizer() -> str:
    """Returns a tokenizer.json with a token for each of LETTERS."""
    vocabulary = {text: number for number, text in enumerate(("<eos>", *LETTERS, "<unk>"))}
    end = {"id": 0, "content": "<eos>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "[\\s\\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
    )


def _config(*lines: str) -> str:
    """Returns a config of a small model on sums of one digit, with further lines from line 18 on."""
    return "\n".join(
        [
            "from jaxrl_post.config import default",
            "",
            "",
            "def get_config():",
            "    c = default()",
            "    c.name, c.steps = 'small', 2",
            "    c.model.preset, c.model.tokenizer = 'tiny', 'words'",
            "    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 8, 32, 8, (32,)",
            "    c.sampling.max_tokens = 8",
            "    c.scheduler.prompts, c.scheduler.group_size = 4, 4",
            "    c.batch.rows, c.batch.tokens = 4, 64",
            "    c.optimizer.lr = 1e-2",
            "    c.checkpoint.every = 1",
            "    c.data.train, c.eval.data = 'train.jsonl', 'held_out.jsonl'",
            "    c.eval.prompts, c.eval.samples = 4, 1",
            "",
            "    # what a case adds",
            *(f"    {line}" for line in lines),
            "    return c",
            "",
        ]
    )


def _rows(pairs: list[tuple[int, int]]) -> str:
    rows = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    return "".join(json.dumps(row) + "\n" for row in rows)


_PAIRS = [(a, b) for a in range(4) for b in range(4)]
FILES = {
    "c.py": _config(),
    "words/tokenizer.json": _tokenizer(),
    "train.jsonl": _rows(_PAIRS[:12]),
    "held_out.jsonl": _rows(_PAIRS[12:]),
}
_LONG = json.dumps({"id": "long", "prompt": "1234567890" * 3 + "=", "answer": "0"}) + "\n"
_SUPERVISED = (
    "--config.engine.name=demonstrations",
    "--config.algorithm.loss_mode=sft",
    "--config.algorithm.adv_estimator=ones",
)
_UNEVALUATED = ("--config.eval=default", "--config.eval.prompts=0")


def _case(name: str, says: str, *flags: str, **more: dict | list) -> dict:
    """Returns a case of the command that trains, with c.py unless the flags say otherwise."""
    files = FILES | dict(more.pop("files", {}))
    return {"name": name, "files": files, "argv": [*RUN, *flags], "says": says, "code": 1, **more}


def _override(name: str, says: str, *overrides: str, **more: dict | list) -> dict:
    return _case(name, says, "--config=c.py", *(f"--config.{one}" for one in overrides), **more)


_NAMES = (
    _override(
        "verl's train_batch_size",
        r"unknown name 'data\.train_batch_size'; verl's data\.train_batch_size is scheduler\.prompts here$",
        "data.train_batch_size=64",
    ),
    _override(
        "verl's rollout.n",
        r"unknown name 'rollout\.n'; verl's actor_rollout_ref\.rollout\.n is scheduler\.group_size here$",
        "rollout.n=8",
    ),
    _override(
        "verl's whole path of the learning rate",
        r"verl's actor_rollout_ref\.actor\.optim\.lr is optimizer\.lr here$",
        "actor_rollout_ref.actor.optim.lr=1e-6",
    ),
    _override(
        "verl's mini-batch",
        r"ppo_mini_batch_size is scheduler\.mini_batches here \(train_batch_size / ppo_mini_batch_size\)$",
        "ppo_mini_batch_size=16",
    ),
    _override(
        "verl's kl_coef", r"algorithm\.kl_ctrl\.kl_coef is algorithm\.kl_coef here", "algorithm.kl_ctrl.kl_coef=0.01"
    ),
    _override(
        "TRL's learning_rate in our section",
        r"unknown name 'optimizer\.learning_rate'; TRL's learning_rate is optimizer\.lr here$",
        "optimizer.learning_rate=1e-5",
    ),
    _override(
        "TRL's max_completion_length",
        r"TRL's max_completion_length is sampling\.max_tokens here$",
        "max_completion_length=64",
    ),
    _override(
        "TRL's gradient_accumulation_steps, which nothing answers",
        r"TRL's gradient_accumulation_steps has no option here: it follows from scheduler\.prompts",
        "gradient_accumulation_steps=4",
    ),
    _override("TRL's beta", r"TRL's beta is algorithm\.kl_loss_coef here$", "algorithm.beta=0.04"),
    _override(
        "OpenRLHF's n_samples_per_prompt",
        r"OpenRLHF's n_samples_per_prompt is scheduler\.group_size here$",
        "n_samples_per_prompt=8",
    ),
    _case(
        "TRL's flag as it is written there",
        r"unknown argument '--learning_rate'; TRL's learning_rate is optimizer\.lr here, set by --config\.NAME=VALUE$",
        *("--config=c.py", "--learning_rate", "1e-5"),
    ),
    _case(
        "an override in verl's form",
        r"unknown argument 'data\.train_batch_size=64'; verl's data\.train_batch_size is scheduler\.prompts here",
        *("--config=c.py", "data.train_batch_size=64"),
    ),
    _case(
        "an override without --config",
        r"unknown argument '--optimizer\.lr=1e-5'; write --config\.optimizer\.lr=1e-5$",
        *("--config=c.py", "--optimizer.lr=1e-5"),
    ),
    _case(
        "TRL's name in a config file",
        r"c\.py:18: unknown name 'num_generations'; TRL's num_generations is scheduler\.group_size here$",
        "--config=c.py",
        files={"c.py": _config("c.num_generations = 8")},
    ),
    _case(
        "verl's section in a config file",
        r"c\.py:18: unknown name 'actor_rollout_ref'; verl's actor_rollout_ref is divided into the sections model",
        "--config=c.py",
        files={"c.py": _config("c.actor_rollout_ref.rollout.n = 8")},
    ),
    _override("the beginning of a name", r"nearest valid name is 'scheduler\.group_size'$", "scheduler.group=8"),
    _override("a typing error", r"nearest valid name is 'scheduler\.prompts'$", "scheduler.promts=8"),
)

_FLAGS = (
    _case("no config", r"^error: no config file: write --config=FILE"),
    _case("two configs", r"--config is given twice, with 'c\.py' and 'd\.py'", "--config=c.py", "--config", "d.py"),
    _case(
        "a config that is not there", r"--config='d\.py': no such Python file; nearest is c\.py$", "--config", "d.py"
    ),
    _case(
        "a flag that is not there", r"unknown argument '--dryrun'; nearest is --dry-run", "--config=c.py", "--dryrun"
    ),
    _case("--resume of no run", r"--resume says not which run", "--config=c.py", "--resume"),
    _case(
        "--resume and --branch",
        r"--branch begins a new run and --resume continues one",
        *("--resume=run", "--branch=run"),
    ),
    _case(
        "two folders",
        r"--run-dir and --resume=FOLDER both name a folder",
        *("--config=c.py", "--run-dir=a", "--resume=b"),
    ),
    _case(
        "--resume of a run that is not there",
        r"--resume of word: there is no folder word; nearest is words$",
        "--resume=word",
    ),
    _case("--resume of no run's folder", r"words has no config\.json to go by", "--resume=words"),
    _case(
        "--resume of a damaged config.json",
        r"--resume of run: run/config\.json: no JSON",
        "--resume=run",
        files={"run/config.json": "{"},
    ),
    _case("--run-dir that holds something", r"--run-dir=words exists already", "--config=c.py", "--run-dir=words"),
    _case("--branch of a run that is not there", r"--branch=rum@3: there is no folder rum", "--branch=rum@3"),
    _case(
        "--branch of a run without checkpoints",
        r"--branch=run: there is no checkpoint in run/checkpoints; it has none$",
        "--config=c.py",
        "--branch=run",
        files={"run/config.json": "{}"},
    ),
    _case("--slice without --dry-run", r"add --dry-run$", "--config=c.py", "--slice=v5e-16"),
    _case(
        "help on a section that is not there",
        r"--help enigne: no such section; nearest is 'engine'",
        "--help",
        "enigne",
    ),
    _case(
        "an override without a value", r"write --config\.engine\.slots=VALUE$", "--config=c.py", "--config.engine.slots"
    ),
    _case("a bucket", r"is a URL, and here a local path is needed", "--config=c.py", "--run-dir=s3://bucket/run"),
)

_DATA = (
    _override(
        "a data file without rows",
        r"data\.train=\S*none\.jsonl has no rows",
        "data.train=none.jsonl",
        files={"none.jsonl": "\n"},
    ),
    _override(
        "a held-out file without rows",
        r"eval\.data=\S*none\.jsonl has no rows",
        "eval.data=none.jsonl",
        files={"none.jsonl": ""},
    ),
    _override(
        "a prompt over the limit",
        r"train\.jsonl, line 13 \(id 'long'\): the prompt has 31 tokens; it must have 1 to 24, .*data\.overlong",
        "name=refused",
        files={"train.jsonl": FILES["train.jsonl"] + _LONG},
    ),
    _override(
        "every prompt is dropped",
        r"data\.train=\S*train\.jsonl: all 1 prompts have more than 24 tokens .* and data\.overlong='drop' leaves none$",
        "data.overlong=drop",
        files={"train.jsonl": _LONG},
    ),
    _override(
        "no such way with long prompts",
        r"data\.overlong='truncate' is not one of refuse, drop, cut",
        "data.overlong=truncate",
    ),
    _override("a data file that is not there", r"there is no file trian\.jsonl", "data.train=trian.jsonl"),
    _override("no held-out file", r"name a file of held-out prompts, or set eval\.prompts=0$", "eval.data="),
    _override("held-out prompts that are trained on", r"share 4 prompts, the first is", "eval.data=train.jsonl"),
    _override(
        "a line that is no JSON",
        r"train\.jsonl, line 2: no JSON",
        "name=torn",
        files={"train.jsonl": FILES["train.jsonl"].splitlines()[0] + '\n{"prompt\n'},
    ),
    _override(
        "an id that comes twice",
        r"train\.jsonl, line 13 .*: has the id of .*line 1;",
        "name=twice",
        files={"train.jsonl": FILES["train.jsonl"] + _rows(_PAIRS[:1])},
    ),
)

_INERT = (
    _override("a gate that never closes", r"algorithm\.min_ess=0\.5 would be ignored", "algorithm.min_ess=0.5"),
    _override(
        "carried rollouts where none run",
        r"engine\.carry_over='verify' would be ignored",
        *("scheduler.name=pipeline", "engine.carry_over=verify"),
    ),
    _override(
        "a penalty that no advantage reads",
        r"algorithm\.overlong_buffer=4 would be ignored: .*the advantage 'ones' reads no reward",
        *("algorithm.adv_estimator=ones", "algorithm.overlong_buffer=4"),
    ),
    _override(
        "shuffled rewards that no advantage reads",
        r"reward\.shuffle=True would be ignored",
        *("algorithm.adv_estimator=ones", "reward.shuffle=true"),
    ),
    _override(
        "a clip that no advantage reaches",
        r"algorithm\.clip_ratio_low=0\.1 would be ignored: .*the other advantages are never negative",
        *("algorithm.adv_estimator=ones", "algorithm.clip_ratio_low=0.1"),
    ),
    _override(
        "a queue that never forms",
        r"scheduler\.max_ready=8 would be ignored: .*without staleness no more than the groups of one step are open",
        *("scheduler.name=pipeline", "scheduler.max_ready=8"),
    ),
    _override("a head that cannot be split", r"batch\.split_head='yes' would be ignored", "batch.split_head=yes"),
    _override("a bound of a race that is not run", r"scheduler\.over=1\.25 would be ignored", "scheduler.over=1.25"),
    _override("drafts that are off", r"speculation\.width=5 would be ignored", "speculation.width=5"),
    _override("discounts of another estimator", r"algorithm\.gamma=0\.9 would be ignored", "algorithm.gamma=0.9"),
    _override("an evaluation that draws nothing", r"eval\.top_p=0\.0 leaves nothing to draw", "eval.top_p=0.0"),
    _case(
        "a temperature of no evaluation",
        r"eval\.temperature=0\.5 would be ignored",
        *("--config=c.py", *_UNEVALUATED, "--config.eval.temperature=0.5"),
    ),
    _case(
        "an alarm on log-probs that demonstrations lack",
        r"alarms\.max_mismatch=0\.5 would be ignored",
        *("--config=c.py", *_SUPERVISED, "--config.alarms.max_mismatch=0.5"),
    ),
    _case(
        "devices of an engine that is not built",
        r"mesh\.engine_tensor=1 would be ignored",
        *("--config=c.py", *_SUPERVISED, *_UNEVALUATED, "--config.mesh.engine_tensor=1"),
    ),
)

_TRAIN = [*RUN, "--config=c.py", *_UNEVALUATED, "--run-dir=run"]
_SPOIL = (
    "from pathlib import Path; file = next(Path('run/checkpoints').glob('step_000002/about.json')); "
    "file.write_text(file.read_text() + ' ')"
)
_RUNS = tuple(
    _case(name, says, *flags, before=before)
    for name, says, flags, before in (
        (
            "a step that was not saved",
            r"--branch=run@7: there is no step 7 in run/checkpoints; it has 1, 2$",
            ("--branch=run@7", "--config.steps=9"),
            [_TRAIN],
        ),
        (
            "a branch that has nothing to do",
            r"--branch=run: steps=2 is reached at step 2, where the branch begins; the nearest valid value is 3$",
            ("--branch=run",),
            [_TRAIN],
        ),
        (
            "a branch with another model",
            r"--branch=run@1: model\.tokenizer .*: the weights of step 1 belong to the first",
            ("--branch=run@1", "--config.model.tokenizer=words/tokenizer.json"),
            [_TRAIN],
        ),
        (
            "a branch with another optimizer state",
            r"--branch=run@1: optimizer\.moments_dtype float32 -> bfloat16: the optimizer's state of step 1 has another form",
            ("--branch=run@1", "--config.optimizer.moments_dtype=bfloat16"),
            [_TRAIN],
        ),
        (
            "a branch from a damaged step",
            r"--branch=run@2: step 2 is damaged, because about\.json has",
            ("--branch=run@2", "--config.steps=9"),
            [_TRAIN, ["-c", _SPOIL]],
        ),
        (
            "a resumed run with another learning rate",
            r"resume refused: optimizer\.lr 0\.01 -> 0\.5: step 2 was saved under the first",
            ("--resume=run", "--config.optimizer.lr=0.5"),
            [_TRAIN],
        ),
        (
            "a run that is begun again",
            r"--run-dir=run exists already and is not an empty folder: a run is never written over",
            ("--config=c.py", "--run-dir=run"),
            [_TRAIN],
        ),
    )
)

CASES: list[dict] = [*_NAMES, *_FLAGS, *_DATA, *_INERT, *_RUNS]
