"""The demo on two devices that do both, of which one is lent to the learner while a long round drains.

Recipe: that of configs/demo_tail_batching.py with one batch a long round. Once two fifths of its answers are done and the others
fit into one of the two replicas, they go on there with their tokens forced, and the other device trains on groups as they
become whole, by eights, until the round is full; what is left then is trained on by both (RollPacker's stream trainer, arXiv
2509.21009, section 5.3). The gradient is the same sum whoever makes its terms, and no answer changes a token. mesh.engine=2 lends
likewise to a learner with a device of its own; weights come in the midst of rounds then, at other clocks than without loans.
Hardware: 2 devices; on a CPU those are made by XLA_FLAGS, as below, and share its cores.
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
