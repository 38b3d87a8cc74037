"""python -m jaxrl_post jetstream --policy POLICY [--port PORT] [...]

Serves a policy over gRPC by JetStream's own orchestrator (extra jetstream). A value stands behind a space or behind "=".
Every client that reaches the address is served.

--policy POLICY        a Hugging Face directory, a llama2.c file, RUN for the policy that a run ended with, or RUN@STEP
--port PORT            9000
--host ADDRESS         the address to listen on; 127.0.0.1, which only this machine reaches
--temperature T        0 is greedy; the policy's own, which is 1 without a run
--top-p P, --top-k K   what may be sampled; the policy's own
--seed N               of the noise, which depends on the prompt and on nothing else; 0
--config.a.b=VALUE     an option of the engine, for example --config.engine.slots=16
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

from jaxrl_post.commands.arguments import Arguments, answered, law, number, whole
from jaxrl_post.serve import listening


def main(arguments: Sequence[str]) -> int:
    """Serves until it is interrupted. Exit code 1, with one sentence, where something given is wrong."""
    return answered(lambda: _serve(_read(arguments)))


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    words = Arguments("jetstream", str(__doc__), overrides=True)
    words.add_argument("--policy", required=True, help=argparse.SUPPRESS)
    words.add_argument("--port", type=whole(1), default=9000, help=argparse.SUPPRESS)
    words.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    words.add_argument("--temperature", type=number, help=argparse.SUPPRESS)
    words.add_argument("--top-p", type=number, help=argparse.SUPPRESS)
    words.add_argument("--top-k", type=whole(0), help=argparse.SUPPRESS)
    words.add_argument("--seed", type=whole(0), default=0, help=argparse.SUPPRESS)
    flags = words.read(arguments)
    listening.check_port("jetstream", flags.port)
    return flags


def _serve(flags: argparse.Namespace) -> int:
    from jaxrl_post.launch import saved_policy
    from jaxrl_post.serve import jetstream

    policy = saved_policy.load(flags.policy, flags.overrides)
    asked = policy.law(law(flags))
    engine = jetstream.Engine(policy.engine(asked), policy.tokenizer, asked, flags.seed)
    server = jetstream.serve(engine, flags.host, flags.port)
    print(f"serving {flags.policy} on {flags.host}:{flags.port}", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved, and JetStream's own stop may wait forever
    server.wait_for_termination()
    return 0
