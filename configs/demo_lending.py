"""The demo on two shared devices, one of which is lent to the learner while a long round drains.

Recipe: that of configs/demo_tail_batching.py with one batch in a long round.
- Lending starts when two fifths of the rollouts are finished and the others fit into one of the two replicas.
- The others continue in that replica with their tokens forced.
- The lent device trains on complete groups, eight at a time, until the round is full. Both devices train on the rest
  (RollPacker's stream trainer, arXiv 2509.21009, section 5.3).

The gradient is the same sum on any devices, and no rollout changes a token. mesh.engine=2 lends in the same way to a
learner with a device of its own. Weights then arrive within rounds, at other clocks than without lending.
Hardware: 2 devices. On a CPU, XLA_FLAGS makes them, as below, and they share its cores.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m jaxrl_post.main --config=configs/demo_lending.py
Expected: sched/num_lendings is 1 in every long round and training/lent_micro_batches above 0.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo_tail_batching.py"))
    c.name = "demo_lending"
    c.mesh.data, c.engine.slots, c.scheduler.long_batches = 2, 32, 1
    c.scheduler.stream, c.scheduler.lend = 8, 0.4
    return c
