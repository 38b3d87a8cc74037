"""The host over arrays takes the decisions of the host over objects, and settles the same rollouts, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.twin import Known, RowTwin
from object_host import ObjectHost

from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.replica import Replica
from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.host.sequence import NEVER, SequenceState
from jaxrl_post.engine.host.slot_table import SlotTable
from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.engine.step_cost import StepCost
from jaxrl_post.ring.types import PER_TOKEN, Prompt, Request, RolloutId, Sampling

LONGEST, VOCABULARY = 40, 12
EOS, STOP = 0, 1


def answer(request, version):
    """Tokens of the id alone. Few of them end a rollout."""
    noise = np.random.default_rng([int(x) for x in request.rollout_id.seed()])
    tokens = noise.integers(2, VOCABULARY, request.max_tokens).astype(np.int32)
    at = int(noise.integers(1, 2 * request.max_tokens))
    if at < tokens.size and request.rollout_id.sample % 3:
        tokens[at] = noise.choice([EOS, STOP])
    return Known(tokens)


class Device(RowTwin):
    """Tells random facts beside the known tokens, and keeps every order and insertion."""

    watched = 5

    def __init__(self, sizes):
        super().__init__(answer, sizes)
        self.told, self.mixed = [], 0

    def put(self, entry, drafts):
        super().put(entry, drafts)
        self.told.append(("put", drafts, entry.joined().tobytes()))

    def prefill(self, tiles):
        super().prefill(tiles)
        self.told.append(("prefill", tiles.tobytes()))

    def dispatch(self, order):
        if self._sizes.prompt_rows:
            lives = [one for slots in order.sequences for one in slots if one]
            assert all(one.num_computed >= one.shared for one in lives), "the row program gets a prompt to compute"
        self.told.append(
            (order.purpose, order.clock, order.version, order.rows, order.drafts, order.freed, order.packed.tobytes())
        )
        self.mixed += len({one.request.purpose for slots in order.sequences for one in slots if one}) > 1
        result = super().dispatch(order)()
        noise = np.random.default_rng([order.clock, len(self.told)])
        blocks = result.out[..., c.OUT_WINDOW :].reshape(*result.out.shape[:2], 5, -1)
        for at in (1, 2):
            blocks[:, :, at] = noise.normal(size=blocks[:, :, at].shape).astype(np.float32).view(np.int32)
        blocks[:, :, 3] += noise.integers(0, 2, blocks[:, :, 3].shape, np.int32) * (blocks[:, :, 3] % 2 == 0)
        blocks[:, :, 4] = noise.integers(0, VOCABULARY, blocks[:, :, 4].shape)
        result.out[..., c.OUT_WINDOW :] = blocks.reshape(*result.out.shape[:2], -1)
        return lambda: result


def host(kind, sizes, rule, share):
    drafting = Drafting(Drafter(), replicas=sizes.replicas, slots=sizes.slots, past=lambda id: ())
    return kind(
        Device(sizes),
        sizes,
        cost=StepCost(sizes.row_sizes, (1.0, 1.6), "two sizes"),
        vocab_size=VOCABULARY,
        drafting=drafting,
        decode=lambda tokens, before=(): "".join(chr(97 + t) for t in tokens),
        swap_policy=SwapPolicy(rule, share),
    )


class Pair:
    """Two hosts that get the same calls."""

    def __init__(self, sizes, rule, share, noise):
        self.both = [host(kind, sizes, rule, share) for kind in (RowHost, ObjectHost)]
        self.sizes, self.noise, self.asked, self.parked = sizes, noise, {}, {}
        self.number = self.preempted = 0

    def ask(self, method, *arguments):
        """Calls both and returns the first one's rollouts, where it gives any."""
        one, two = ([facts(r) for r in getattr(host, method)(*arguments) or ()] for host in self.both)
        assert one == two, method
        return one

    def submit(self, purpose):
        """Two groups, some of whose members go on from a prefix."""
        noise, out = self.noise, []
        for _ in range(2):
            tokens = noise.integers(2, VOCABULARY, noise.integers(1, 15))
            prompt, replica = Prompt(id=f"p{self.number}", tokens=tokens), int(noise.integers(self.sizes.replicas))
            law = Sampling(
                eos_ids=(EOS,),
                stop_ids=(STOP,),
                stop_strings=("gh", "jkk")[: int(noise.integers(0, 3))],
                temperature=0.5,
            )
            for sample in range(int(noise.integers(1, 4))):
                id = RolloutId(0, purpose, 0, prompt.id, sample)
                out.append(
                    Request(
                        rollout_id=id,
                        prompt=prompt,
                        seed=id.seed(),
                        max_tokens=int(noise.integers(1, 24)),
                        sampling=law,
                        replica=replica,
                    )
                )
            self.number += 1
        again = [self.resumed(id) for id in list(self.parked) if noise.random() < 0.6]
        for request in (*out, *again):
            self.asked[request.rollout_id] = request
        self.ask("submit", [*out, *again])

    def resumed(self, id):
        prefix, request = self.parked.pop(id), self.asked[id]
        mode = str(self.noise.choice(["recompute", "verify", "restart"]))
        if mode == "verify" and len(prefix) and self.noise.random() < 0.5:
            tokens = prefix.tokens.copy()
            tokens[self.noise.integers(len(tokens))] = 3
            prefix = type(prefix)(**{n: getattr(prefix, n) for n in prefix.__slots__} | {"tokens": tokens})
        return Request(rollout_id=id, prompt=request.prompt, seed=request.seed, max_tokens=request.max_tokens,
                       sampling=request.sampling, replica=request.replica, prefix=prefix, prefix_mode=mode)  # fmt: skip

    def park(self):
        some = [id for id in self.both[0].sequences if self.noise.random() < 0.3]
        rollouts = self.both[0].park(some)
        assert [facts(r) for r in rollouts] == [facts(r) for r in self.both[1].park(some)]
        self.parked |= {r.id: r for r in rollouts if r.id.purpose == "train"}

    def swap(self):
        self.ask("swap", None, self.both[0].version + 1)

    def save(self):
        one, two = (plain(host.state_dict()) for host in self.both)
        assert one == two
        prompts = {request.prompt.id: request.prompt for request in self.asked.values()}
        for host in self.both:
            host.load_state_dict(host.state_dict(), prompts)

    def compare(self):
        one, two = self.both
        assert one.device.told == two.device.told
        assert (one.capacity, one.pending, one.clock) == (two.capacity, two.pending, two.clock)
        counted = one.metrics()
        assert counted == two.metrics()
        self.preempted += counted.get("sched/preemptions", 0)
        for mine, theirs in zip(one.admission.replicas, two.admission.replicas):
            assert [s and s.pages for s in mine.slots] == [s and s.pages for s in theirs.slots]
            assert (
                mine.pages._free == theirs.pages._free and mine.pages._counts.tolist() == theirs.pages._counts.tolist()
            )


def facts(rollout):
    arrays = [(getattr(rollout, name).dtype.str, getattr(rollout, name).tobytes()) for name in PER_TOKEN]
    return rollout.id, rollout.finish, rollout.start_clock, rollout.finish_clock, arrays


def plain(value):
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


MOVES = st.lists(
    st.sampled_from(["train", "train", "step", "step", "step", "park", "swap", "eval", "save"]), max_size=30
)


def served(moves, seed, replicas, slots, pages, rule, share, prompt_rows=0):
    """Runs the moves on both hosts, then to the end."""
    sizes = c.EngineSettings(
        replicas=replicas,
        slots=slots,
        max_length=LONGEST,
        page_size=4,
        pages=pages,
        row_sizes=(slots, 4 * slots),
        head_rows=slots,
        steps_per_dispatch=3,
        refill_slots=2,
        prompt_rows=prompt_rows,
    )
    pair = Pair(sizes, rule, share, np.random.default_rng(seed))
    for move in moves:
        if move in ("train", "eval"):
            pair.submit(move)
        elif move == "step":
            pair.ask("step")
        else:
            getattr(pair, move)()
        pair.compare()
    for _ in range(2000):
        if not pair.both[0].pending:
            break
        pair.ask("step")
    assert not pair.both[0].pending
    pair.compare()
    assert all(replica.pages.free >= pages - sum(len(e.ids) for e in replica.prompts.entries.values())
               for replica in pair.both[0].admission.replicas)  # fmt: skip
    return pair


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    MOVES,
    st.integers(0, 99),
    st.integers(1, 2),
    st.integers(2, 5),
    st.sampled_from([10, 14, 60]),
    st.sampled_from(["keep", "recompute", "verify", "auto"]),
    st.sampled_from([0.2, 1.0]),
)
def test_arrays_decide_and_settle_as_objects_do(moves, seed, replicas, slots, pages, rule, share):
    served(moves, seed, replicas, slots, pages, rule, share)


@pytest.mark.parametrize("rule", ["keep", "verify"])
def test_a_long_run_short_of_pages(rule):
    noise = np.random.default_rng(5)
    few = ["train", "step", "step", "step", "step", "swap", "park", "eval", "save"]
    pair = served(["train"] * 3 + noise.choice(few, 70).tolist(), 7, 2, 4, 12, rule, 1.0)
    assert {told[0] for told in pair.both[0].device.told} == {"put", "train", "eval"}
    assert pair.both[0].clock > 50 and pair.preempted > 10


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(6, 14))])
def test_a_wide_program_computes_every_prompt_before_its_rollouts_run(seed):
    noise = np.random.default_rng(seed)
    few = ["train", "train", "step", "step", "swap", "park", "eval", "save"]
    rule, pages = str(noise.choice(["keep", "recompute", "verify", "auto"])), int(noise.choice([12, 60]))
    moves = ["train"] * 3 + noise.choice(few, 50).tolist()
    pair = served(moves, seed, 2, 4, pages, rule, float(noise.choice([0.2, 1.0])), prompt_rows=64)
    assert sum(told[0] == "prefill" for told in pair.both[0].device.told) > 10
    assert pair.preempted > 0 or pages > 12


def test_a_long_run_with_both_purposes_in_slots():
    moves = ["train", "train", "step", "step", "eval", "step", "park", "swap"] * 10
    pair = served(moves, 7, 2, 4, 60, "keep", 1.0)
    assert pair.both[0].device.mixed > 5


def test_two_dispatches_by_hand():
    """A prompt of 3 tokens in slot 0 gets 2 tokens from version 3 and 1 from version 5. Clocks need 64 bits."""
    sizes = c.EngineSettings(
        slots=2, max_length=16, page_size=4, pages=8, row_sizes=(2,), head_rows=2, steps_per_dispatch=2
    )
    replica, table, id = Replica(2, 8, 4), SlotTable(sizes), RolloutId(0, "train", 0, "p", 0)
    prompt = Prompt(id="p", tokens=np.arange(2, 5))
    asked = Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=9, sampling=Sampling(eos_ids=(EOS,)))
    one = SequenceState(request=asked, age=7)
    replica.seat(one, None, ("k",))
    table.enter(one, replica)
    assert (one.oldest, one.num_tokens, table.order().tolist()) == (NEVER, 3, [[0, 1]])
    live, found = table.mask("train"), []
    for tokens, clock, version in ([8, 9], 1 << 33, 3), ([EOS], (1 << 33) + 2, 5):
        out = np.zeros((1, 2, c.OUT_WINDOW + 5 * sizes.emit), np.int32)
        out[0, 0, : c.OUT_WINDOW] = one.num_tokens + len(tokens), one.num_tokens + len(tokens) - 1, 0, 0
        blocks = out[0, 0, c.OUT_WINDOW :].reshape(5, -1)[:, : len(tokens)]
        blocks[0], blocks[1:3], blocks[3], blocks[4] = tokens, np.float32(-0.5).view(np.int32), [0, 3][: len(tokens)], 6
        found.append(table.settle(live, out, clock, version, False))
    assert found == [[], [(0, 0, 5)]] and (one.oldest, one.num_tokens, one.num_computed) == (3, 6, 5)
    table.leave(one)
    assert (one.tokens, one.column("versions").tolist(), one.oldest) == ([8, 9, EOS], [3, 3, 5], 3)
    assert one.column("clocks").tolist() == [(1 << 33) + 1, (1 << 33) + 2, (1 << 33) + 3]
    assert one.column("drafted").tolist() == [False, True, False] and one.column("logprobs").tolist() == [-0.5] * 3
    assert one.column("argmax_tokens").tolist() == [6] * 3 and not table.mask("train").any()
