"""The demo on two devices that both generate and train. One of them is lent to the learner while a long round drains.

Recipe: that of configs/demo/tail_batching.py with one batch a long round. The loan is that of RollPacker's stream
trainer (arXiv 2509.21009, section 5.3):
- It begins once two fifths of the rollouts have finished and the others fit into one of the two replicas.
- The running rollouts continue in that replica, with their tokens forced.
- The other device trains on complete groups, eight at a time, until the round is complete.
- Both devices train on the groups that are left.

The gradient is the same sum, whichever device computes its terms, and no rollout changes a token. mesh.engine=2 lends
likewise to a learner with a device of its own. Then new weights arrive within rounds, at other clocks than without
loans.
Hardware: 2 devices. On a CPU they are made by XLA_FLAGS, as below, and share its cores.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m jaxrl_post.main --config=configs/demo/lending.py
Expected: sched/num_lendings is 1 in every long round and training/lent_micro_batches is above 0.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/tail_batching.py"))
    c.name = "demo_lending"
    # Why 32: two replicas have the 64 slots of the demo. Why 1: a streamed round has one batch.
    c.mesh.data, c.engine.slots, c.scheduler.long_batches = 2, 32, 1
    # Why 8: the lent device gets an eighth of a batch at a time. Why 0.4: enough is done by then to train on. The loan
    # also waits until the rest fits into half of the slots.
    c.scheduler.stream, c.scheduler.lend = 8, 0.4
    return c
