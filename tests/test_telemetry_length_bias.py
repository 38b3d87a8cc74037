"""The bias meter: against numbers worked out by hand, and against a twin that gives every generated token a serial number
and then looks which of them anybody still has."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import plain_rollouts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.ring.types import Finish, Group, Prompt, Request, RolloutId, Sampling
from jaxrl_post.runs.checkpoint import host_state
from jaxrl_post.telemetry import length_bias
from jaxrl_post.telemetry.length_bias import BiasMeter


def prompt(name="p"):
    return Prompt(id=name, tokens=[1, 2])


def named(sample, *, epoch=0, name="p", attempt=0):
    return RolloutId(0, "train", epoch, name, sample, attempt)


def request(id, **changed):
    return Request(
        rollout_id=id, prompt=prompt(id.prompt_id), seed=id.seed(), max_tokens=99, sampling=Sampling(), **changed
    )


def rollout(id, tokens, finish=Finish.EOS):
    tokens = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return plain_rollouts.rollout(id, prompt(id.prompt_id), tokens, finish=finish)


def group(*rollouts):
    none = np.zeros(len(rollouts))
    return Group(prompt=rollouts[0].prompt, rollouts=rollouts, rewards=none, scored=none == 0)


def test_bins_are_half_octaves():
    for length in [*range(1, 3000), 2**17, 2**19]:
        assert length_bias.bin_of(length) == math.floor(2 * math.log2(length) + 1e-9) + 1
    edges = length_bias.edges()
    assert length_bias.bin_of(0) == 0 and edges[:7] == [0, 1, 2, 2, 3, 4, 6] and len(edges) == 40
    assert all(length_bias.bin_of(n) == max(k for k, edge in enumerate(edges) if edge <= n) for n in range(3, 3000))


def test_a_rollout_left_out_of_its_group_counts_with_the_tokens_it_had():
    """Lengths 2, 5 and one cut at 7: trained (2 + 5) / 2 = 3.5, launched at least 14 / 3."""
    meter, ids = BiasMeter(), [named(s) for s in range(3)]
    meter.launched([request(id) for id in ids], 0, 0)
    meter.stepped([rollout(ids[0], 2)], 2)
    meter.stepped([rollout(ids[1], 5)], 5)
    meter.stopped([rollout(ids[2], 7, Finish.PARKED)], 7, 0)
    meter.trained([group(rollout(ids[0], 2), rollout(ids[1], 5))])
    row = meter.metrics("short")
    assert row["bias/shift"] == pytest.approx(3.5 / (14 / 3) - 1) == row["bias/shift_so_far"]
    assert row["bias/num_tokens_generated"] == 14 and row["bias/num_tokens_wasted"] == 7
    assert row["bias/num_dropped"] == 1 and row["bias/num_untrained"] == 0
    assert row["bias/histogram_distance"] == pytest.approx(1 / 3)  # 2, 5, 7 lie in bins of their own
    assert row["bias/step_length/short"] == 3.5 and "bias/step_length/short" not in meter.metrics("short")
    again = meter.metrics("short")
    assert again["bias/num_tokens_generated"] == 0 and again["bias/shift"] == row["bias/shift"]
    report = meter.report()
    assert report["num_tokens_wasted"] == 7 and report["num_prompts_that_differ"] == 1
    assert report["prompt_shift/mean"] == pytest.approx(3.5 / (14 / 3) - 1)
    assert sum(report["histograms"]["trained"]) == 2 and report["histograms"]["dropped"][length_bias.bin_of(7)] == 1


def test_whoever_knows_the_lengths_sees_the_whole_shift():
    meter, ids = BiasMeter(lambda r: 10 * (r.rollout_id.sample + 1)), [named(s) for s in range(2)]
    meter.launched([request(id) for id in ids], 0, 0)
    meter.stepped([rollout(ids[0], 10)], 10)
    meter.stopped([rollout(ids[1], 10, Finish.PARKED)], 10, 0)
    meter.trained([group(rollout(ids[0], 10))])
    assert meter.metrics("short")["bias/shift"] == pytest.approx(10 / 15 - 1)


def test_a_deferred_group_is_trained_whole_and_shifts_nothing_for_good():
    meter, ids = BiasMeter(), [named(s) for s in range(2)]
    other = [named(s, name="q") for s in range(2)]
    meter.launched([request(id) for id in ids + other], 0, 3)
    meter.stepped([rollout(id, 4) for id in other] + [rollout(ids[0], 4)], 4)
    parked = rollout(ids[1], 6, Finish.PARKED)
    meter.stopped([parked], 6, 3)
    meter.trained([group(*(rollout(id, 4) for id in other))])
    row = meter.metrics("short")
    assert row["bias/shift"] == 0 and row["bias/shift_so_far"] == pytest.approx(4 / 4.5 - 1)  # 4, 4, 4 and at least 6
    assert row["bias/num_untrained"] == 2
    meter.launched([request(ids[1], prefix=parked)], 6, 5)
    meter.stepped([rollout(ids[1], 20)], 20)
    meter.trained([group(rollout(ids[0], 4), rollout(ids[1], 20))])
    row = meter.metrics("long")
    assert row["bias/shift"] == row["bias/shift_so_far"] == row["bias/histogram_distance"] == 0
    assert row["bias/num_rollouts_deferred"] == row["bias/most_deferrals"] == 1 and row["bias/longest_park"] == 2
    assert row["bias/num_tokens_recomputed"] == 6 and row["bias/num_tokens_wasted"] == 0
    assert row["bias/num_tokens_generated"] == 14
    assert row["bias/step_length/long"] == 12 and "bias/step_length/short" not in row
    assert meter.report()["num_prompts_that_differ"] == 0


def test_a_request_that_goes_on_under_the_same_weights_is_not_deferred():
    meter, id = BiasMeter(), named(0)
    meter.launched([request(id)], 0, 1)
    meter.stopped([parked := rollout(id, 6, Finish.PARKED)], 6, 1)
    meter.launched([request(id, prefix=parked)], 6, 1)
    assert meter.metrics("short")["bias/num_rollouts_deferred"] == 0


@pytest.mark.parametrize("later", [named(0, attempt=1), named(0, epoch=64)])
def test_what_is_drawn_anew_or_64_epochs_old_is_dropped(later):
    meter = BiasMeter()
    meter.launched([request(named(0)), request(named(1))], 0, 0)
    meter.stopped([rollout(named(0), 8, Finish.PARKED), rollout(named(1), 5, Finish.PARKED)], 8, 0)
    meter.launched([request(named(0, epoch=1))], 8, 1)
    assert meter.metrics("short")["bias/num_dropped"] == 0
    meter.launched([request(later)], 8, 2)
    row = meter.metrics("short")
    both = later.epoch == 64
    assert row["bias/num_dropped"] == 1 + both and row["bias/num_tokens_wasted"] == 8 + 5 * both


class Twin:
    """Who still has which generated token, by serial number. `inside`: what each answer in the engine brought along."""

    def __init__(self, ids):
        self.serial, self.recomputed, self.held = 0, 0, {id: [] for id in ids}
        self.texts, self.inside, self.outside = {id: [] for id in ids}, {id: (0, []) for id in ids}, {}

    def leaves(self, id, text):
        """It ends, or is taken out, with this text; what it carried is there already."""
        carried, candidates = self.inside.pop(id)
        kept = carried
        if candidates:
            kept = next(
                (i for i, (a, b) in enumerate(zip(candidates, text)) if a != b), min(len(candidates), len(text))
            )
            self.recomputed += kept
        self.held[id] = [*self.held[id][:kept], *range(self.serial, self.serial + len(text) - kept)]
        self.serial += len(text) - kept
        self.texts[id] = text

    def enters(self, id, mode):
        text = self.texts[id]
        self.recomputed += len(text) if mode == "recompute" else 0
        self.held[id] = [] if mode == "restart" else self.held[id]
        self.inside[id] = {"recompute": (len(text), []), "verify": (0, text), "restart": (0, [])}[mode]

    @property
    def wasted(self):
        return self.serial - sum(map(len, self.held.values()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_generated_token_is_held_or_wasted(data):
    """Answers enter, leave, come back in every mode and end in every way; at some moments the meter is saved and loaded."""
    ids = [named(s, name=n) for n in "pq" for s in range(3)]
    meter, twin, version = BiasMeter(), Twin(ids), 0
    meter.launched([request(id) for id in ids], 0, 0)
    for _ in range(data.draw(st.integers(1, 25))):
        version += data.draw(st.booleans())
        id = data.draw(st.sampled_from(sorted(twin.held or ids)))
        if id in twin.inside:
            carried = twin.inside[id][0]
            fresh = data.draw(st.lists(st.integers(0, 1), max_size=8))
            twin.leaves(id, [*twin.texts[id][:carried], *fresh])
            how = data.draw(st.sampled_from(("finish", "park")))
            twin.outside[id] = told = rollout(id, twin.texts[id], Finish.EOS if how == "finish" else Finish.PARKED)
            if how == "finish":
                meter.stepped([told], 0)
            else:
                meter.stopped([told], 0, version)
        elif id in twin.outside:
            mode = data.draw(st.sampled_from(("recompute", "verify", "restart")))
            twin.enters(id, mode)
            meter.launched([request(id, prefix=twin.outside.pop(id), prefix_mode=mode)], 0, version)
        if data.draw(st.integers(0, 9)) == 0:
            meter = saved_and_loaded(meter)
    for id in list(twin.inside):  # so that nothing is in the air
        twin.leaves(id, [*twin.texts[id][: twin.inside[id][0]], 5])
        meter.stepped([rollout(id, twin.texts[id])], 0)
    row = meter.report()
    assert row["num_tokens_generated"] == twin.serial and row["num_tokens_wasted"] == twin.wasted
    assert row["num_tokens_recomputed"] == twin.recomputed and row["num_untrained"] == len(twin.held)


def saved_and_loaded(meter):
    again = BiasMeter()
    again.load_state_dict(meter.state_dict())
    assert again.report() == meter.report()
    return again


def test_its_state_goes_through_a_checkpoint(tmp_path):
    meter = BiasMeter()
    meter.launched([request(named(s, name=str(n))) for n in range(70) for s in range(2)], 0, 2)
    meter.stepped([rollout(named(0, name="3"), 5)], 5)
    parked = rollout(named(1, name="3"), 4, Finish.PARKED)
    meter.stopped([parked], 5, 2)
    meter.launched([request(parked.id, prefix=parked, prefix_mode="verify")], 5, 3)
    meter.metrics("short")
    host_state.write_state(tmp_path / "host", meter.state_dict())
    again = BiasMeter()
    again.load_state_dict(host_state.read_state(tmp_path / "host"))
    for each in (meter, again):
        each.stepped([rollout(parked.id, [0, 1, 9])], 8)
        each.trained([group(rollout(named(0, name="3"), 5), rollout(parked.id, [0, 1, 9]))])
    assert again.metrics("short") == meter.metrics("short") and again.report() == meter.report()
    assert meter.report()["num_tokens_recomputed"] == 2 and meter.report()["num_tokens_wasted"] == 2


def test_a_trained_group_leaves_nothing_waiting():
    """First two of three: the third, done too, is dropped with its group, another epoch's is not."""
    meter, ids = BiasMeter(), [named(s) for s in range(3)]
    meter.launched([request(id) for id in ids] + [request(named(0, epoch=1))], 0, 0)
    done = [rollout(id, 3 + id.sample) for id in ids]
    meter.stepped(done, 5)
    meter.trained([dataclasses.replace(group(*done[:2]))])
    row = meter.metrics("short")
    assert row["bias/num_dropped"] == 1 and row["bias/num_untrained"] == 1 and row["bias/num_tokens_wasted"] == 5
    assert row["bias/shift"] == pytest.approx(3.5 / 4 - 1)


def test_an_answer_that_was_taken_for_lost_is_trained_on_after_all():
    """Put off for 64 epochs of its prompt: dropped when the prompt comes again, and then trained on, 5 tokens beside 3."""
    meter, old, new = BiasMeter(), named(0), named(0, epoch=64)
    meter.launched([request(old)], 0, 0)
    meter.stepped([rollout(old, 5)], 5)
    meter.launched([request(new)], 5, 1)
    assert meter.metrics("short")["bias/num_dropped"] == 1
    meter.stepped([rollout(new, 3)], 8)
    meter.trained([group(rollout(old, 5)), group(rollout(new, 3))])
    row = meter.metrics("long")
    assert (row["bias/num_dropped"], row["bias/num_untrained"], row["bias/shift"]) == (0, 0, 0)
    assert row["bias/trained_length/mean"] == row["bias/launched_length/mean"] == 4
    assert meter.report()["num_tokens_wasted"] == 0
