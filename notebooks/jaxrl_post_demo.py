# %% [markdown]
# # jaxrl_post: a policy learns to add, with your reward
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_post/blob/main/notebooks/jaxrl_post_demo.ipynb)
#
# You train a small language model by GRPO, with a reward function that you write. The whole notebook took 86 seconds on two
# CPU cores (`scripts/results/notebook.json`). It needs no account and no download of weights.
#
# You see the reward rise, rollouts before and after, where the time went, and that the fast modes change no token.
#
# Honest limits: the project has run on CPUs and on one GPU, never on a TPU. This notebook has run on CPUs alone, and never on
# Colab's own machines.

# %% [markdown]
# ## Install
#
# This cell finds or fetches the project. Where packages of this kernel are too old, such as a preinstalled jax, it leaves
# them alone: it makes an environment beside the kernel, and all later cells run there.

# %%
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/OWNER/jaxrl_post"

here = Path.cwd()
near = (here, here.parent, here / "jaxrl_post")
root = next((one for one in near if (one / "notebooks" / "environment.py").is_file()), None)
if root is None:
    if "/OWNER/" in REPOSITORY:
        raise ValueError(
            "REPOSITORY names no owner yet: write the address of your copy of the project, or upload it to this folder"
        )
    root = here / "jaxrl_post"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", REPOSITORY, str(root)], check=True)
sys.path.insert(0, str(root / "notebooks"))

import environment

environment.prepare(root)

# %% [markdown]
# ## What this runtime is
#
# The cell looks for a CPU, a T4 or L4 GPU, or a TPU v5e-1, and picks settings for it.

# %%
import os

import pictures
import runtimes

import jaxrl_post

runtime = runtimes.found()
STEPS = int(os.environ.get("JAXRL_DEMO_STEPS", "48"))

# %% [markdown]
# ## The task, and a reward that you edit
#
# A prompt is a sum such as `47+8+5=`. A rollout is right where the text behind `#` is the total.
# The policy that we begin with mostly guesses: `#55`. It also knows how to work a sum out: `47+8=55+5=60#60`.
#
# **Edit `reward`** and run the notebook from here again. The function sees the completions and all columns of the data.
# Ideas: give 0.2 for a completion that shows its work (`"=" in text`), or take 0.01 for each character.


# %%
def reward(completions, total, **columns):
    return [1.0 if text.rpartition("#")[2] == one else 0.0 for text, one in zip(completions, total)]


rows = [
    {"prompt": f"{a}+{b}+{c}=", "total": str(a + b + c)}
    for a in range(10, 60)
    for b in range(1, 9)
    for c in range(1, 9)
]
held_out = {f"{a}+{b}+{c}=": str(a + b + c) for a, b, c in [(61, 7, 8), (72, 9, 5), (85, 6, 7), (94, 3, 4), (66, 8, 9)]}
print("47+8+5= with #60, #61 and no total:", reward(["47+8=55+5=60#60", "#61", "47"], total=["60", "60", "60"]))

# %% [markdown]
# ## Rollouts before training
#
# The rollouts of a policy depend on weights, prompt and seed alone. So the same seeds serve again after training.

# %%
untrained = jaxrl_post.load("configs/demo_policy", sampling__max_tokens=96, **runtime.engine)
before = untrained.generate(list(held_out), n=4, seeds=1)
print(before[0][0])

# %% [markdown]
# ## Train
#
# `jaxrl_post.train` is the run of the command line. It compiles its programs first.
# Each optimizer step generates 8 rollouts for each of 64 prompts, scores them with your function in processes of their own,
# and updates the weights by GRPO.

# %%
recipe = dict(runtime.options)
run = jaxrl_post.train(
    runtimes.CONFIG, rewards=[reward], data=rows, callbacks=[pictures.Curve(STEPS)], steps=STEPS, **recipe
)
curve = run.metrics["critic/score/mean"]
print(f"reward: {curve[0]:.3f} -> {curve[-1]:.3f}, the run lies in {run.folder}")

# %% [markdown]
# ## Before and after
#
# The sums are held out: no training prompt begins with a number of 60 or more. The noise is equal in both columns.

# %%
trained = jaxrl_post.load(run.folder)
after = trained.generate(list(held_out), n=4, seeds=1)
pictures.before_and_after(
    list(held_out), before, after, right=lambda prompt, text: reward([text], total=[held_out[prompt]])[0] > 0.5
)

# %% [markdown]
# ## Where the time goes
#
# The second and third step, slot by slot. Each line of the lower part is a slot of the engine, and each bar is a rollout.
# Red is a slot that waits for the last rollouts of its round. The strips above show the seconds of engine, rewards, learner
# and weight sync.

# %%
pictures.timeline({"Synchronous rounds": run.folder}, rounds=slice(1, 3))

# %% [markdown]
# ## Rollouts of the last step
#
# Every fortieth of its 512 rollouts. A log-prob near 0 is a token that the policy was sure of.

# %%
pictures.rollouts([one for one in run.rollouts if one["step"] == STEPS][::40])

# %% [markdown]
# ## Faster modes, the same bits
#
# Now we turn on speculation, and then a pipeline as well. What makes generation fast never changes which token a rollout
# has under given weights. Tokens and log-probs are compared bit by bit.
#
# 1. Speculation, with learning: the first steps of the run above once more. Drafts are guessed tokens that the engine checks.
# 2. Speculation in a pipeline, which starts prompts without waiting for a round. A pipeline trains on tokens of older
#    weights, so its weights would differ. The learning rate is 0 here, so that the weights stay those of the first step.

# %%
import contextlib
import io

drafts = {
    "speculation__drafter": "ours",
    "speculation__clones": False,
    "speculation__width": 5,
    "speculation__shared_entries": 3 << 12,
    "speculation__live_entries": 1 << 10,
}
pipeline = {"scheduler__name": "pipeline", "scheduler__max_staleness": 2, "scheduler__ahead": 16, "optimizer__lr": 0.0}


def bits(rollouts):
    """The bits of each rollout, by epoch, prompt and sample."""
    return {
        (one["epoch"], one["prompt_id"], one["sample"]): (one["tokens"].tobytes(), one["logprobs"].tobytes())
        for one in rollouts
    }


def compare(title, fast, plain):
    theirs, ours = bits(fast.rollouts), bits(plain)
    both = theirs.keys() & ours.keys()
    equal = sum(theirs[one] == ours[one] for one in both)
    accepted = sum(fast.metrics["spec/num_accepted"])
    print(f"{title}: {equal} of {len(both)} rollouts have equal bits, with {accepted:.0f} accepted draft tokens")


few = min(2, STEPS)
with contextlib.redirect_stdout(io.StringIO()):  # what the runs print is what the run above printed
    drafted = jaxrl_post.train(runtimes.CONFIG, [reward], rows, steps=few, **recipe, **drafts)
    piped = jaxrl_post.train(runtimes.CONFIG, [reward], rows, steps=2, **recipe, **drafts, **pipeline)
compare("speculation", drafted, [one for one in run.rollouts if one["step"] <= few])
compare("speculation in a pipeline", piped, [one for one in run.rollouts if one["step"] == 1])

# %% [markdown]
# ## Go on
#
# `run.folder` holds `report.html` with all curves and rollouts on one page, the metrics, every rollout and the trained
# policy as a Hugging Face directory. The pages in `docs/` say more: `python.md` for this interface, `concepts.md` for the reasons,
# `modes.md` for the modes, and `colab.md` for this notebook.
