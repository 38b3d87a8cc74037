"""README's first block trains with a reward of one's own and learns: as a script, and twice in one notebook kernel.

The block is taken from README.md and run unchanged in an empty folder that holds configs/ alone. The bound on the rise of the
reward is four standard errors of a difference between two means of three steps. A step has 64 prompts with 8 rollouts each.
Were the 8 all equal, the error of such a mean would be at most 0.5 / sqrt(3 * 64) = 0.036. That of the difference would be
0.051. Both runs of the kernel, and the script, must end in the same weights and rollouts bit for bit.

Then the example rewards of TRL's documentation are trained with, unchanged: on texts, and on conversations. What the pool
returned for every rollout is compared with the function called here on the same completions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import textwrap
from pathlib import Path

import nbclient
import nbformat
import pages

from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.trained import columns

MINUTES = 12.0
SOURCES = ("README.md", "configs/demo.py", "jaxrl_post/commands/api.py")
LIMIT_S = 1800.0  # of the script, and of the kernel
RISE = 4 * math.sqrt(2) * 0.5 / math.sqrt(3 * 64)  # 0.204
STEPS = 3  # whose mean is compared

# What a run left, as the last line of a process or a cell.
TOLD = """
import hashlib, json
def told(run):
    weights = hashlib.sha256((run.policy / "model.safetensors").read_bytes()).hexdigest()
    tokens = hashlib.sha256(repr([(row["tokens"].tolist(), row["logprobs"].tolist()) for row in run.rollouts]).encode()).hexdigest()
    return {"weights": weights, "tokens": tokens, "rollouts": len(run.rollouts), "reward": run.metrics["critic/score/mean"]}
print("TOLD" + json.dumps(told(run)))
"""

# The examples of TRL's GRPO trainer page, "Using a custom reward function", and of its quick start.
TEXTS = '''
import re

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

def reward_num_unique_chars(completions, **kwargs):
    return [len(set(completion)) for completion in completions]

def reward_ids(completion_ids, completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]

def reward_ground_truth(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \\boxed{}
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def check_math_solution(prompt, completion):
    return completion.rpartition("#")[2] == str(eval(prompt.rstrip("=")))

def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            # Calculate math-specific reward
            correct = check_math_solution(prompt, completion)
            reward = 1.0 if correct else -1.0
            rewards.append(reward)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards
'''
MESSAGES = '''
import re

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

def reward_digits(completions, **kwargs):
    return [float(len(re.findall(r"[0-9]", completion[0]["content"]))) for completion in completions]
'''


def show(record) -> None:
    text = (record.root / "README.md").read_text()
    block = pages.python_blocks(record.root / "README.md")[0]
    first = text[text.index("```") :]
    record.figure("is_readmes_first_block", first.startswith(f"```python\n{block}"), equals=True)
    record.figure("lines", len(block.strip().splitlines()), at_most=12)
    script = record.cached("script", lambda: _script(record, block))
    kernel = record.cached("kernel", lambda: _kernel(record, block))
    for name, found in (("script", script), ("kernel_first", kernel[0]), ("kernel_second", kernel[1])):
        reward = found["reward"]
        before, after = (sum(part) / STEPS for part in (reward[:STEPS], reward[-STEPS:]))
        record.figure(f"{name}.reward.first_{STEPS}_steps", before)
        record.figure(f"{name}.reward.last_{STEPS}_steps", after)
        record.figure(f"{name}.reward.rise", after - before, at_least=RISE)
        record.figure(f"{name}.rollouts", found["rollouts"], at_least=512 * len(reward))
    for name in ("weights", "tokens"):
        record.figure(f"equal_{name}_twice_in_one_process", kernel[0][name] == kernel[1][name], equals=True)
        record.figure(f"equal_{name}_in_script_and_kernel", script[name] == kernel[0][name], equals=True)
    for kind, functions in (("texts", TEXTS), ("messages", MESSAGES)):
        found = record.cached(f"trl-{kind}", lambda kind=kind, functions=functions: _trl(record, kind, functions))
        record.figure(f"trl.{kind}.functions", found["functions"], at_least=2)
        record.figure(f"trl.{kind}.scores_compared", found["compared"], at_least=64)
        record.figure(f"trl.{kind}.scores_that_differ", found["differ"], equals=0)
        record.figure(f"trl.{kind}.nones", found["nones"], **({"at_least": 16} if kind == "texts" else {"equals": 0}))


def _environment(record) -> dict[str, str]:
    paths = [str(record.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


def _folder(record, folder: str) -> Path:
    shutil.copytree(record.root / "configs", Path(folder) / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(folder)


def _told(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("TOLD")) for line in text.splitlines() if line.startswith("TOLD")]


def _script(record, block: str) -> dict:
    """Runs the block as a file, and reads what it left from a second process."""
    with tempfile.TemporaryDirectory() as folder:
        place = _folder(record, folder)
        (place / "script.py").write_text(block)
        record.said("script.py", timeout_s=LIMIT_S, env=_environment(record), cwd=place)
        (run,) = (place / "runs").iterdir()
        return _left(run)


def _left(run: Path) -> dict:
    """Returns what TOLD does, from the files of a run."""
    files = sorted((run / "rollouts").glob("step_*.npz"))
    rollouts = [r for file in files for group in rollout_log.read(file) for r in group.rollouts]
    tokens = repr([(r.tokens.tolist(), r.logprobs.tolist()) for r in rollouts])
    rows = [row for row in metric_rows.read(run / "metrics.jsonl") if metric_rows.is_of_step(row)]
    return {
        "weights": hashlib.sha256((run / "policy" / "model.safetensors").read_bytes()).hexdigest(),
        "tokens": hashlib.sha256(tokens.encode()).hexdigest(),
        "rollouts": len(rollouts),
        "reward": columns(rows)["critic/score/mean"],
    }


def _kernel(record, block: str) -> list[dict]:
    """Runs the block twice in one notebook kernel, as cells."""
    cells = [nbformat.v4.new_code_cell(source) for source in (block, TOLD, block, TOLD)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as folder:
        place = _folder(record, folder)
        client = nbclient.NotebookClient(
            notebook, timeout=int(LIMIT_S), kernel_name="python3", resources={"metadata": {"path": str(place)}}
        )
        before = dict(os.environ)
        os.environ.update(_environment(record))  # the kernel's
        try:
            client.execute()
        finally:
            os.environ.clear()
            os.environ.update(before)
    out = "".join(one.get("text", "") for cell in notebook.cells for one in cell.outputs if one.output_type == "stream")
    found = _told(out)
    if len(found) != 2:
        raise RuntimeError(f"the notebook told of {len(found)} runs:\n{out[-4000:]}")
    return found


TRAIN = """
import json, sys
import jaxrl_post

kind, folder = sys.argv[1:]
named = [one for one in list(globals().values()) if hasattr(one, "__code__")]
functions = [one for one in named if "completions" in one.__code__.co_varnames[: one.__code__.co_argcount]]
sums = [f"{a}+{b}" for a in range(10, 14) for b in range(2, 6)]
rows = [
    {
        "prompt": f"{one}=" if kind == "texts" else [{"role": "user", "content": f"{one}="}],
        "ground_truth": str(eval(one)),
        "task": ("math", "code")[place % 2],
    }
    for place, one in enumerate(sums)
]
run = jaxrl_post.train("configs/demo.py", functions, rows, steps=1, scheduler__prompts=16, scheduler__group_size=4,
                       model__path=folder, data__format="trl")
compared = differ = nones = 0
for row in run.rollouts:
    said = row["text"] if kind == "texts" else [{"role": "assistant", "content": row["text"]}]
    given = {name: [value] for name, value in row["columns"].items()}
    for function in functions:
        (own,) = function(prompts=[row["prompt"]], completions=[said], completion_ids=[row["tokens"].tolist()], **given)
        theirs = row["components"].get(f"{function.__name__}/score")
        nones += own is None
        compared += 1
        differ += (own is None) != (theirs is None) or (own is not None and abs(own - theirs) > 1e-5)
print("TOLD" + json.dumps({"functions": len(functions), "compared": compared, "differ": differ, "nones": nones}))
"""


def _trl(record, kind: str, functions: str) -> dict:
    """Trains for a step with TRL's functions in a script of their own."""
    with tempfile.TemporaryDirectory() as folder:
        place = _folder(record, folder)
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        (place / "configs" / "demo_policy" / "chat_template.jinja").write_text(template)
        (place / "trl.py").write_text(textwrap.dedent(functions) + TRAIN)
        words = ("trl.py", kind, "configs/demo_policy")
        (found,) = _told(record.said(*words, timeout_s=LIMIT_S, env=_environment(record), cwd=place))
        return found
