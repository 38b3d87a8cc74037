"""python -m jaxrl_post replay RUN --rollout=ID [--json] [--from-start]
python -m jaxrl_post replay RUN --batch=STEP

Repeats what a run did. Nothing in the run's folder is changed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config.command_line import Flag, whole
from jaxrl_post.data.continuations import Pieces
from jaxrl_post.runs import run_logs

_FLAGS = (
    Flag("RUN", "a run's folder"),
    Flag(
        "--rollout=ID",
        "samples a logged rollout again, bit for bit: the ring turns from the last checkpoint before its first token until "
        "it is finished. Scores come from the run's journal. Tokens, log-probs, versions and all else are compared with "
        "the log. Exit code 1 where they differ. `rollouts RUN` prints the ids",
        default=None,
    ),
    Flag("--json", "prints one object instead of text"),
    Flag("--from-start", "turns the ring from the beginning of the run, also where checkpoints were pruned"),
    Flag(
        "--batch=STEP",
        "repeats the gradient of a skipped optimizer step from its batch, RUN/skipped/step_NNNNNN.npz, and says what in it "
        "is not finite. The weights are those of the newest whole checkpoint before the step, or those that the run began "
        "with",
        whole(1),
        None,
    ),
)


def _repeat(flags: argparse.Namespace) -> int:
    if flags.rollout is None and flags.batch is None:
        raise ValueError("replay: say what is repeated: --rollout=ID or --batch=STEP")
    if flags.batch is None:
        return _rollout(flags)
    if flags.rollout is not None:
        raise ValueError("replay: argument --batch: not allowed with argument --rollout")
    if flags.json or flags.from_start:
        raise ValueError("replay: --json and --from-start belong to --rollout, not to --batch")
    return _batch(flags)


main = Command("replay", __doc__, _FLAGS, _repeat)


def _batch(flags: argparse.Namespace) -> int:
    from jaxrl_post.launch import past_run

    learner, groups, at = past_run.skipped_batch(flags.run, flags.batch)
    print("\n".join(past_run.batch_findings(learner, groups, flags.batch, at)))
    return 0


def _rollout(flags: argparse.Namespace) -> int:
    name, logs = run_logs.parsed_name(flags.rollout), run_logs.opened(flags.run)
    logs.find(name)  # before jax and the run are loaded
    from jaxrl_post.commands.repeated import repeated

    (again,) = repeated(logs, [name], from_start=flags.from_start)
    decode = run_logs.tokenizer_of(logs).decode
    print(json.dumps(as_json(again, decode)) if flags.json else "\n".join(lines(again, decode)))
    return 0 if again.equal else 1


def verdict(again) -> str:
    """Returns one line: whether the rollout was repeated, and else what differs."""
    begun = f"the checkpoint of step {again.begun}" if again.begun else "the beginning of the run"
    head = f"{again.name}, logged with step {again.step}, again from {begun}"
    if again.found is None:
        return f"{head}: DIFFERENT: the ring finished no such rollout"
    if again.restored:
        return f"{head}: DIFFERENT: {again.restored} of its tokens were in the checkpoint and are not sampled again"
    if again.differences:
        told = ", ".join(f"{field} at {count}" for field, count in again.differences.items())
        return f"{head}: DIFFERENT: {told} of {len(again.logged)} tokens"
    versions = sorted(set(again.found.versions.tolist()))
    return f"{head}: equal bit for bit: {len(again.found)} tokens, sampled by weights {', '.join(map(str, versions))}"


def lines(again, decode) -> Iterator[str]:
    """Yields the verdict, the texts, and a line for each token."""
    yield verdict(again)
    rollout = again.found or again.logged
    yield f"  prompt  {decode(rollout.prompt.tokens)!r}   answer {rollout.prompt.answer!r}"
    yield f"  text    {decode(rollout.tokens, before=rollout.prompt.tokens)!r}   ends by {rollout.finish.value}"
    yield f"  {'':>5}  {'token':>7}  {'log-prob':>13}  {'weights':>7}  text"
    texts = Pieces(decode, rollout.prompt.tokens).more(rollout.tokens)
    for place, (token, logprob, version, drafted, text) in enumerate(
        zip(rollout.tokens, rollout.logprobs, rollout.versions, rollout.drafted, texts, strict=True)
    ):
        mark = "  drafted" if drafted else ""
        yield f"  {place:>5}  {token:>7}  {logprob:>13.9g}  {version:>7}  {text!r}{mark}"


def as_json(again, decode) -> dict:
    """Returns the comparison and the repeated rollout, or the logged one where there is none, as plain values."""
    rollout = again.found or again.logged
    return {
        "rollout": str(again.name),
        "step": again.step,
        "from": again.begun,
        "equal": again.equal,
        "differences": again.differences,
        "restored_tokens": again.restored,
        "finished": again.found is not None,
        "prompt": decode(rollout.prompt.tokens),
        "answer": rollout.prompt.answer,
        "text": decode(rollout.tokens, before=rollout.prompt.tokens),
        "finish": rollout.finish.value,
        "tokens": rollout.tokens.tolist(),
        "logprobs": rollout.logprobs.tolist(),
        "versions": rollout.versions.tolist(),
        "drafted": rollout.drafted.tolist(),
    }
