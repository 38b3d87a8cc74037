"""python -m jaxrl_post export --policy POLICY --out FOLDER [--adapter] [--dtype DTYPE]

Writes a policy as a Hugging Face directory. Low-rank additions (lora.rank) are merged into its weights.
"""

from __future__ import annotations

import argparse

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import POLICY, Command
from jaxrl_post.config.command_line import OVERRIDE, Flag

DTYPES = ("float32", "bfloat16", "float16")

_FLAGS = (
    Flag("--policy=POLICY", f"{POLICY}; or an adapter of PEFT", required=True),
    Flag("--out=FOLDER", "the directory to write; an earlier export there is replaced", required=True),
    Flag("--adapter", "writes the additions alone, in PEFT's format"),
    Flag("--dtype=DTYPE", "of merged weights; without it that of the model's own files", choices=DTYPES),
    Flag(OVERRIDE, "an option, such as --config.mesh.tensor=2 for a model that one device cannot hold"),
)


def _write(flags: argparse.Namespace) -> int:
    configs.refuse_url(flags.out, "--out")
    if flags.adapter and flags.dtype not in ("", "float32"):
        raise ValueError(f"export: --dtype={flags.dtype} is of merged weights; an adapter is written as float32")
    from jaxrl_post.launch.parts import saved_policy

    if flags.adapter:
        saved_policy.write_adapter(flags.policy, flags.out)
    else:
        saved_policy.write_merged(flags.policy, flags.out, flags.dtype, flags.overrides)
    print(f"wrote {flags.out}")
    return 0


main = Command("export", __doc__, _FLAGS, _write)
