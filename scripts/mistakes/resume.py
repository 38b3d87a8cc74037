"""Mistakes at a resume: checkpoints, keys and logs that are gone, another config or other data, a folder of something else."""

from __future__ import annotations

CONFIG = """
from pathlib import Path
import jaxrl_post
from jaxrl_post.config import default

def get_config():
    c = default()
    c.name, c.steps, c.run_dir = "own", 2, "runs"
    c.model.path = str(Path(jaxrl_post.__file__).parents[1] / "configs" / "demo_policy")
    c.data.train, c.eval.prompts = "train.jsonl", 0
    c.reward.functions, c.checkpoint.every = ("reward.py:score",), 1
    c.scheduler.prompts, c.scheduler.group_size = 2, 2
    c.engine.slots, c.engine.max_length, c.engine.row_sizes = 4, 32, (32,)
    c.sampling.max_tokens, c.batch.rows, c.batch.tokens = 8, 2, 64
    return c
"""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)
"""
ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+3=", "answer": "4"}\n'
FILES = {
    "config.py": CONFIG,
    "reward.py": REWARD,
    "train.jsonl": ROWS,
    "other.jsonl": ROWS.replace("1+1", "2+2"),
    "notes/todo.txt": "nothing to do with a run",
}
TRAIN = ("-m", "jaxrl_post.main", "--config=config.py")
RUN = [[*TRAIN, "--run-dir=run"]]
UNSAVED = [[*TRAIN, "--run-dir=run", "--config.checkpoint.every=0"]]
AGAIN = (*TRAIN, "--run-dir=run", "--resume")


def case(name: str, says: str, *argv: str, lost=(), before=RUN, then: str = "") -> dict:
    """A run that has ended, what is lost of it, and what a program `then` does to it before the command."""
    made = [*before, *([["-c", then]] if then else [])]
    return {"name": name, "files": FILES, "before": made, "lost": list(lost), "argv": list(argv), "says": says}


GONE = (
    r"--resume: run has logs of 2 finished steps and no checkpoint to go on from \(its first save was due at step 1\)"
)
CUT = "from pathlib import Path; file = Path('run/{}'); file.write_bytes(file.read_bytes()[:{}])"
CASES = [
    case("checkpoints that are gone", GONE, *AGAIN, lost=["run/checkpoints"]),
    case(
        "checkpoints that are gone, and a run that must be there",
        GONE,
        *TRAIN,
        "--resume=run",
        lost=["run/checkpoints"],
    ),
    case(
        "every step of the checkpoints gone",
        GONE,
        *AGAIN,
        lost=["run/checkpoints/step_000001", "run/checkpoints/step_000002"],
    ),
    case("checkpoints gone, and more steps asked for", GONE, *AGAIN, "--config.steps=4", lost=["run/checkpoints"]),
    case(
        "a run that saves nothing",
        r"has logs of 2 finished steps and no checkpoint to go on from \(checkpoint.every=0 saves none\)",
        *AGAIN,
        "--config.checkpoint.every=0",
        before=UNSAVED,
    ),
    case("the key gone", r"checkpoints/.key is missing or unreadable", *AGAIN, lost=["run/checkpoints/.key"]),
    case(
        "metrics gone",
        r"run/metrics.jsonl has 0 bytes, the checkpoint knows of \d+",
        *AGAIN,
        lost=["run/metrics.jsonl"],
    ),
    case(
        "scores gone", r"run/rewards.jsonl has 0 bytes, the checkpoint knows of \d+", *AGAIN, lost=["run/rewards.jsonl"]
    ),
    case(
        "a log that was cut",
        r"run/scheduler_log.jsonl has 9 bytes, the checkpoint knows of",
        *AGAIN,
        then=CUT.format("scheduler_log.jsonl", 9),
    ),
    case(
        "a config that was cut", r"--resume: run/config.json cannot be read", *AGAIN, then=CUT.format("config.json", 20)
    ),
    case(
        "another learning rate",
        r"resume refused: optimizer.lr .* -> 0.5: step 2 was saved under the first",
        *AGAIN,
        "--config.optimizer.lr=0.5",
    ),
    case("another seed", r"resume refused: .*seed 0 -> 1", *AGAIN, "--config.seed=1"),
    case("fewer steps", r"resume refused: .*steps 2 -> 1", *AGAIN, "--config.steps=1"),
    case("other data", r"resume refused: .*data.train", *AGAIN, "--config.data.train=other.jsonl"),
    case(
        "rows that changed",
        r"resume refused: .*data.train.digest",
        *AGAIN,
        then='open(\'train.jsonl\', \'a\').write(\'{"prompt": "3=", "answer": "3"}\')',
    ),
    case(
        "a reward function that changed",
        r"resume refused: .*reward_code",
        *AGAIN,
        then="open('reward.py', 'a').write('CHANGED = True')",
    ),
    case(
        "another reward function",
        r"resume refused: .*reward.functions",
        *AGAIN,
        "--config.reward.functions=['jaxrl_post.rewards.math:exact']",
    ),
    case(
        "a run that is not there",
        r"--resume=nowhere: there is no such folder; to begin a run there write",
        *TRAIN,
        "--resume=nowhere",
        before=[],
    ),
    case(
        "a folder that is no run",
        r"--resume: notes is not the folder of a run: it holds 'todo.txt'",
        *TRAIN,
        "--resume=notes",
        before=[],
    ),
    case("a file as a run", r"train.jsonl", *TRAIN, "--resume=train.jsonl", before=[]),
    case(
        "a folder that is in use by another purpose",
        r"--run-dir=notes exists already and is not an empty folder",
        *TRAIN,
        "--run-dir=notes",
        before=[],
    ),
    case(
        "a run that would be written over",
        r"--run-dir=run exists already .*a run is never written over",
        *TRAIN,
        "--run-dir=run",
    ),
    case("a run folder below a file", r"train.jsonl/run|train.jsonl", *TRAIN, "--run-dir=train.jsonl/run", before=[]),
]
