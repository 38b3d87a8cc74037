"""A random Qwen2.5-0.5B runs configs/models/gsm8k_qwen2_5_0_5b.py on real GSM8K rows on the CPU, in the memory planned for it.

Makes the checkpoint in a temporary folder. It has random weights of the model's shape in bfloat16 (about 1 GB), a
byte-level BPE tokenizer trained on GSM8K's own text, and a ChatML template. Then runs the shipped config for 2 steps
with fewer prompts, rollouts, slots and rows. Random weights get nothing right, and equal rewards have no gradient. So a
third reward function, of TRL's signature, pays for tokens with an odd id. The highest resident memory of the run is
VmHWM of its process, without the reward processes. It is compared with the line that `--dry-run` of the same command
prints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MINUTES = 12.0
CONFIG = "configs/models/gsm8k_qwen2_5_0_5b.py"
SMALL = (
    "steps=2",
    "scheduler.prompts=2",
    "scheduler.group_size=2",
    "sampling.max_tokens=16",
    "engine.max_length=384",
    "engine.slots=8",
    "engine.row_sizes=[32]",
    "engine.page_size=32",
    "engine.steps_per_dispatch=4",
    "batch.rows=2",
    "batch.tokens=384",
    "batch.head_chunk=192",
    "eval.prompts=2",
    "eval.samples=1",
    "eval.every=0",
    "eval.show=1",
    "checkpoint.every=0",
    "checkpoint.keep_last=3",
    "checkpoint.max_failures=3",
)
MERGES = 4096  # size of the trained vocabulary
ROOM_GIB = 16.0  # free memory that the run needs
ENDS = ("<|im_end|>", "<|endoftext|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WATCHED = (
    "import sys\n"
    "from jaxrl_post.main import main\ncode = main(sys.argv[1:])\n"
    "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))\nsys.exit(code)"
)


REWARD = """
def odd(completions, completion_ids, ground_truth, **columns):
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]
"""


def show(record) -> None:
    gsm8k = record.data("gsm8k")
    free = _free_gib()
    if free < ROOM_GIB:
        raise RuntimeError(f"gsm8k-shape needs {ROOM_GIB:g} GiB of free memory, here are {free:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = place / "models" / "Qwen2.5-0.5B-Instruct"
        subprocess.run([sys.executable, __file__, str(model), str(gsm8k)], cwd=record.root, check=True, timeout=900)
        size = sum(file.stat().st_size for file in model.iterdir())
        record.figure("checkpoint_bytes", size, at_least=900_000_000)
        (place / "reward.py").write_text(REWARD)
        paid = ["jaxrl_post.rewards.math:strict", "jaxrl_post.rewards.math:flexible", f"{place / 'reward.py'}:odd"]
        flags = [f"--config.{one}" for one in (*SMALL, f"reward.functions={paid}", "reward.weights=[1.0, 0.0, 0.1]")]
        environment = {"JAXRL_MODELS": str(model.parent), "JAXRL_DATA": str(gsm8k.parent), "JAX_PLATFORMS": "cpu"}
        planned = _planned(record, environment | {"JAX_COMPILATION_CACHE_DIR": str(place / "cache_plan")}, flags)
        said, seconds = _command(
            record,
            environment | {"JAX_COMPILATION_CACHE_DIR": str(place / "cache_run")},
            *flags,
            f"--run-dir={place / 'run'}",
        )
        _record_run(record, place / "run", seconds)
    measured = int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) * 1024 / 2**20
    record.figure("planned_mib", planned)
    record.figure("measured_vmhwm_mib", measured)
    record.figure("planned_to_measured", planned / measured, at_least=0.9, at_most=1.1)


def _record_run(record, run: Path, seconds: float) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    record.figure("steps", len(steps), equals=2)
    record.figure("least_gradient_norm", min(row["actor/grad_norm"] for row in steps), at_least=1e-6)
    record.figure("most_gradient_norm", max(row["actor/grad_norm"] for row in steps), at_most=1e6)
    record.figure("unscored", sum(row["reward/unscored"] for row in steps), equals=0)
    record.figure("longest_prompt_tokens", max(row["prompt_length/max"] for row in steps))
    record.figure("step_seconds", [round(row["timing_s/step"], 1) for row in steps])
    record.figure("seconds", seconds)


def _planned(record, environment: dict, flags: list[str]) -> float:
    """Returns the MiB on the line of the process that --dry-run prints."""
    said, _ = _command(record, environment, *flags, "--dry-run")
    sys.stdout.write(said[said.index("Memory of the process") :])
    return float(re.search(r"process at its highest\s+([\d,.]+) MiB", said)[1].replace(",", ""))


def _command(record, environment: dict, *flags: str) -> tuple[str, float]:
    begun = time.monotonic()
    said = record.said("-c", WATCHED, f"--config={CONFIG}", *flags, timeout_s=3600, env=environment)
    return said, time.monotonic() - begun


def _free_gib() -> float:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 2**20


def make(folder: Path, gsm8k: Path, shape) -> None:
    """Writes the checkpoint: random weights of a shape, and a tokenizer made for GSM8K."""
    import tokenizers

    from jaxrl_post.models import decoder, hf

    rows = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text().splitlines()]
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    texts = (row[part] for row in rows for part in ("question", "answer"))
    words.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=MERGES,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made = folder.parent / "tokenizer"
    made.mkdir(parents=True)
    words.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": ENDS[0], "chat_template": CHATML}))
    hf.save(
        folder,
        shape,
        decoder.init(shape, 0),
        dtype="bfloat16",
        eos_ids=tuple(map(words.token_to_id, ENDS)),
        tokenizer_files=sorted(made.iterdir()),
    )


if __name__ == "__main__":
    # A process of its own: its memory is not the run's.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from jaxrl_post.models.presets import PRESETS

    make(Path(sys.argv[1]), Path(sys.argv[2]), PRESETS["qwen2_5_0_5b"])
