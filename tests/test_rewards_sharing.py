"""Two processes of a job, of which the first grades, as two threads; every score is known by hand."""

import threading

import numpy as np
from test_rewards_pool import Log, graders, group, joined, pool, rollout  # noqa: F401  (a fixture, and what it is for)

from jaxrl_post.rewards.pool import HEAD


def two_processes(work) -> list:
    """What `work(compute, share, sent)` gives in each: `share` is a barrier and a box that process 0 fills, `sent` the sizes of
    what went through it."""
    barrier, box, out = threading.Barrier(2), {}, {}

    def process(rank: int):
        sent = []

        def share(vector):
            sent.append(vector.size)
            if rank == 0:
                box["vector"] = vector
            barrier.wait(30)
            got = box["vector"].copy()
            assert got.shape == vector.shape and got.dtype == np.uint8
            barrier.wait(30)
            return got

        out[rank] = work(rank == 0, share, sent)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [out[0], out[1]]


def test_process_zero_shares_what_it_scored(graders):  # noqa: F811
    rollouts = [rollout(text, i) for i, text in enumerate(["gold", "raise", "over 0.5"])]

    def work(compute, share, sent):
        journal = Log()
        with pool(graders, "mixed", "named", share=share, compute=compute, journal=journal) as rewards:
            out = joined(rewards, *rollouts)
            return out, journal, {k: v for k, v in rewards.metrics().items() if k.startswith("reward/")}

    (mine, *seen), (theirs, *seen_there) = two_processes(work)
    assert seen == seen_there and seen[1]["reward/unscored"] == 1 and seen[1]["reward/overruns"] == 1
    for out in (mine, theirs):
        assert out.rewards.tolist() == [5, 0, 8.5] and out.scored.tolist() == [True, False, True]
    for name, values in mine.components.items():
        np.testing.assert_array_equal(values, theirs.components[name])


def test_what_is_ready_comes_in_one_message(graders):  # noqa: F811
    """One worker answers in order, so that when the last group is there the others are. An answer that is taken up again after
    its score has come is scored anew, and one of a group that has come in part is not asked for twice."""
    groups = [[rollout(f"{10 * g + i}", i, prompt=f"p{g}") for i in range(3)] for g in range(4)]
    longer = rollout("55", 1, prompt="p1")
    late = [rollout("7", 0, prompt="late"), rollout("8", 1, prompt="late")]

    def work(compute, share, sent):
        journal = Log()
        with pool(graders, "number", share=share, compute=compute, journal=journal, workers=1) as rewards:
            for one in [one for some in groups for one in some]:
                rewards.start(one)
            scored = [rewards.join(group(*groups[3])).rewards.tolist()]
            first = len(sent)
            scored += [rewards.join(group(*groups[g])).rewards.tolist() for g in (0, 2)]
            assert len(sent) == first
            rewards.start(late[0])
            rewards.start(longer)
            scored.append(rewards.join(group(groups[1][0], longer, groups[1][2])).rewards.tolist())
            assert len(sent) > first
            rewards.start(late[1])
            scored.append(rewards.join(group(*late)).rewards.tolist())
        return scored, sent, [(r["prompt_id"], r["sample"], r["reward"]) for r in journal]

    mine, theirs = two_processes(work)
    assert mine == theirs
    assert mine[0] == [[30, 31, 32], [0, 1, 2], [20, 21, 22], [10, 55, 12], [7, 8]]
    assert mine[2][9:] == [("p1", 0, 10.0), ("p1", 1, 55.0), ("p1", 2, 12.0), ("late", 0, 7.0), ("late", 1, 8.0)]


def test_a_long_message_comes_whole(graders):  # noqa: F811
    rollouts = [rollout(str(i / 7), i) for i in range(60)]  # some 200 bytes each

    def work(compute, share, sent):
        with pool(graders, "number", share=share, compute=compute) as rewards:
            return joined(rewards, *rollouts).rewards.tolist(), sent

    mine, theirs = two_processes(work)
    assert mine[1] == theirs[1] and len(mine[1]) == 2 and mine[1][0] == HEAD < mine[1][1]  # its head, and the rest
    assert mine[0] == theirs[0] == np.array([i / 7 for i in range(60)], np.float32).tolist()
