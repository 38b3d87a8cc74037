"""python -m jaxrl_post jetstream --policy POLICY [--port PORT] [...]

Serves a policy over gRPC by JetStream's own orchestrator (extra jetstream).
Every client that reaches the address is served.
"""

from __future__ import annotations

import argparse
import signal

from jaxrl_post.commands.arguments import POLICY, SAMPLING_FLAGS, Command, sampling_changes
from jaxrl_post.config.command_line import OVERRIDE, Flag, whole
from jaxrl_post.serve import listening

_FLAGS = (
    Flag("--policy=POLICY", POLICY, required=True),
    Flag("--port=PORT", "9000", whole(1), 9000),
    Flag("--host=ADDRESS", "the address to listen on; 127.0.0.1, which only this machine reaches", str, "127.0.0.1"),
    *SAMPLING_FLAGS,
    Flag(OVERRIDE, "an option of the engine, for example --config.engine.slots=16"),
)


def _serve(flags: argparse.Namespace) -> int:
    listening.check_port("jetstream", flags.port)
    from jaxrl_post.launch.parts import saved_policy
    from jaxrl_post.serve import jetstream

    policy = saved_policy.load(flags.policy, flags.overrides)
    sampling = policy.sampling_with(sampling_changes(flags))
    engine = jetstream.Engine(policy.engine(sampling), policy.tokenizer, sampling, flags.seed)
    server = jetstream.serve(engine, flags.host, flags.port)
    print(f"serving {flags.policy} on {flags.host}:{flags.port}", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved, and JetStream's own stop may wait forever
    server.wait_for_termination()
    return 0


main = Command("jetstream", __doc__, _FLAGS, _serve)
