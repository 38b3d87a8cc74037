"""python -m jaxrl_post export --policy POLICY --out FOLDER [--adapter] [--dtype DTYPE]

Writes a policy as a Hugging Face directory. Low-rank additions (lora.rank) are merged into its weights. A value stands
behind a space or behind "=".

--policy POLICY     a Hugging Face directory, a llama2.c file, an adapter of PEFT, RUN for the policy that a run ended with,
                    or RUN@STEP
--out FOLDER        the directory to write; an earlier export there is replaced
--adapter           writes the additions alone, in PEFT's format
--dtype DTYPE       of merged weights: float32, bfloat16 or float16; without it that of the model's own files
--config.a.b=VALUE  an option, for example --config.mesh.tensor=2 for a model that one device cannot hold
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxrl_post import config as configs
from jaxrl_post.commands.arguments import Arguments, answered

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Writes the directory. Exit code 1, with one sentence, where something given is wrong."""
    return answered(lambda: _write(_read(arguments)))


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("export", str(__doc__), overrides=True)
    words.add_argument("--policy", required=True, help=argparse.SUPPRESS)
    words.add_argument("--out", required=True, help=argparse.SUPPRESS)
    words.add_argument("--adapter", action="store_true", help=argparse.SUPPRESS)
    words.add_argument("--dtype", choices=DTYPES, default="", help=argparse.SUPPRESS)
    flags = words.read(arguments)
    configs.refuse_url(flags.out, "--out")
    if flags.adapter and flags.dtype not in ("", "float32"):
        raise ValueError(f"export: --dtype={flags.dtype} is of merged weights; an adapter is written as float32")
    return flags


def _write(flags: argparse.Namespace) -> int:
    from jaxrl_post.launch import saved_policy

    if flags.adapter:
        saved_policy.write_adapter(flags.policy, flags.out)
    else:
        saved_policy.write_merged(flags.policy, flags.out, flags.dtype, flags.overrides)
    print(f"wrote {flags.out}")
    return 0
