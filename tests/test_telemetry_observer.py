"""Rows of metrics against hand-computed numbers; the stopwatch against a clock that is moved by hand."""

import jax.numpy as jnp
import numpy as np
import plain_rollouts
import pytest

from jaxrl_post.config import AlarmConfig
from jaxrl_post.rewards import NoScores
from jaxrl_post.rewards.jobs import FirstScores
from jaxrl_post.ring.events import TimedRing
from jaxrl_post.ring.timing import AtWork, Stopwatch
from jaxrl_post.ring.types import Finish, Group, Part, Prompt, RolloutId
from jaxrl_post.runs.metric_rows import is_timing
from jaxrl_post.telemetry.alarms import Alarms
from jaxrl_post.telemetry.observer import Observer


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Source:
    def __init__(self, name):
        self.name, self.count = name, 0

    def metrics(self):
        count, self.count = self.count, 0
        return {self.name: float(count)}


def group(lengths, rewards, acc, scored, *, finish=Finish.EOS, epoch=0, prompt=2):
    given = Prompt(id=f"p{epoch}", tokens=np.ones(prompt), source="s")
    rollouts = []
    for sample, n in enumerate(lengths):
        zeros = np.zeros(n)
        sampled = zeros == 0
        sampled[:1] = sample > 0  # the first token of the first rollout was observed
        rollouts.append(
            plain_rollouts.rollout(
                RolloutId(0, "train", epoch, given.id, sample), given, zeros, finish=finish, sampled=sampled
            )
        )
    return Group(prompt=given, rollouts=tuple(rollouts), rewards=rewards, scored=scored, components={"acc": acc})


class Meter:
    def metrics(self, kind):
        return {f"bias/{kind}": 1.0}


GROUPS = (
    group([3, 5], [1.0, -1.0], [1, 0], [1, 1]),
    group([8, 4], [4.0, 99.0], [1, np.nan], [1, 0], finish=Finish.LENGTH, epoch=2, prompt=5),
)


OFF = AlarmConfig(
    equal_rewards=0.0, min_entropy=0.0, max_entropy=0.0, shrinkage=0.0, growth=0.0, max_mismatch=0.0, hacking=0.0
)


def watched(**changed):
    clock, rows, logged, asked, warm = Clock(), [], [], [], []

    def evaluate(version):
        clock.now += 7
        asked.append(version)
        rows.append((version, {"val-core/s/acc/mean@4": 0.5}))

    watch = Stopwatch(clock, lambda: clock.now / 2)
    sources = [Source("sched/x"), Source("rows/y"), Source("reward/z")]
    given = dict(
        ring=TimedRing(watch),
        sources=sources,
        write=lambda step, row: rows.append((step, row)),
        log=lambda step, groups: logged.append((step, groups)),
        evaluate=evaluate,
        when=lambda before, version: version == 2,
        meter=Meter(),
        save=lambda version: None,
        saved_at=lambda before, version: False,
        alarms=Alarms(OFF, 1000, print),
        dump=lambda step, groups: logged.append((f"dumped {step}", groups)),
        warm=lambda: warm.append(len(rows)),
        watch=watch,
        devices=2,
    )
    return Observer(**(given | changed)), clock, watch, sources, rows, logged, asked, warm


def test_a_row_per_step_and_evaluations_between():
    observe, clock, _, sources, rows, logged, asked, warm = watched()
    part = Part(fresh=GROUPS, groups=GROUPS, commit=True, publish=True)
    for version in range(1, 5):
        clock.now += 3
        sources[0].count = version
        observe.commit({"actor/loss": jnp.float32(version / 4)}, part)
        clock.now += 1
        observe.published(version)
    assert [step for step, _ in rows] == [1, 2, 2, 3]  # what nobody waits for is put off
    observe.ring.flush()
    observe.flush()
    assert [step for step, _ in rows] == [1, 2, 2, 3, 4] and asked == [2] and warm == [1]
    steps = [row for _, row in rows if "training/global_step" in row]
    assert [row["actor/loss"] for row in steps] == [0.25, 0.5, 0.75, 1.0]
    assert all(row["critic/score/max"] == 4.0 for row in steps)  # described
    assert [row["off_policy/max"] for row in steps] == [0, 1, 2, 3]  # the batch's tokens are all of version 0
    assert [row["sched/x"] for row in steps] == [1, 2, 3, 4] and all("bias/short" in row for row in steps)
    assert [row["timing_s/step"] for row in steps] == [4, 4, 11, 4]
    assert [row.get("timing_s/testing") for row in steps] == [None, None, 7, None]
    assert steps[0]["perf/throughput"] == 34 / 4 / 2 and {row["perf/host_cores_busy"] for row in steps} == {0.5}
    assert logged == [(n, GROUPS) for n in (1, 2, 3, 4)] and observe.tokens == 4 * 18


def test_a_round_of_two_steps_is_logged_and_counted_once():
    observe, clock, _, _, rows, logged, *_ = watched()
    for step in range(2):
        clock.now += 1
        observe.commit(
            {}, Part(fresh=() if step else GROUPS, groups=GROUPS[step : step + 1], commit=True, publish=step == 1)
        )
    clock.now += 1
    observe.published(2)
    assert logged == [(1, GROUPS)] and observe.tokens == 18
    assert [row["training/global_step"] for _, row in rows if "training/global_step" in row] == [1, 2]
    assert rows[0][1]["critic/score/max"] != rows[1][1]["critic/score/max"]  # each row describes its own groups


def test_seconds_stand_on_the_row_of_a_commit_that_is_published():
    """A round of three optimizer steps takes 10 s of generation, 1 s, 1 s and 4 s, the last of which its publish waited for."""
    observe, clock, watch, sources, rows, *_ = watched()
    engine = sources[1]
    engine.metrics = lambda: {
        "rows/decode": 30.0 * (observe.step % 3 == 1),
        "spec/num_accepted": 10.0 * (observe.step % 3 == 1),
    }

    def lasting(seconds):
        clock.now += seconds

    for first in (0, 3):
        watch.timing("gen", lasting)(10)
        for step in range(3):
            watch.timing("update_actor", lasting)(1)
            given = dict(fresh=GROUPS if step == 0 else (), groups=GROUPS, commit=True, publish=step == 2)
            observe.commit({}, Part(**given))
        watch.timing("update_actor", lasting)(4)
        observe.published(first + 3)
    observe.ring.flush()
    steps = [row for _, row in rows if "training/global_step" in row]
    timed = [
        {name: value for name, value in row.items() if is_timing(name) and name != "timing_s/log"} for row in steps
    ]
    assert [bool(row) for row in timed] == [False, False, True] * 2
    assert (
        timed[2]
        == timed[5]
        == {
            "timing_s/gen": 10.0,
            "timing_s/update_actor": 7.0,
            "timing_s/step": 17.0,
            "perf/host_cores_busy": 0.5,
            "perf/time_per_step": 17 / 3,
            "perf/total_num_tokens": 3 * 34.0,
            "perf/throughput": 3 * 34 / 17 / 2,
            "perf/generated_tokens_per_s": 40 / 10,
        }
    )


def test_no_rate_of_generation_where_the_engine_counts_none():
    observe, clock, *_, rows, _, _, _ = watched()
    clock.now += 1
    observe.commit({}, Part(fresh=GROUPS, groups=GROUPS, commit=True, publish=True))
    observe.published(1)
    observe.ring.flush()
    assert "perf/throughput" in rows[0][1] and "perf/generated_tokens_per_s" not in rows[0][1]


def test_a_save_comes_last_and_is_asked_for_by_the_versions_around_it():
    """Publishes after 2, 4, 6 and 8 steps; every 3 of them: after 4 and 6. Who takes up its state saves alike."""

    def watching():
        saved = []
        observe, clock, _, _, rows, _, asked, warm = watched(
            save=lambda version: saved.append((version, len(rows), list(asked), len(warm))),
            saved_at=lambda before, version: version // 3 > before // 3,
        )
        return observe, clock, saved

    part = Part(fresh=GROUPS, groups=GROUPS, commit=True, publish=True)
    observe, clock, saved = watching()
    for version in (2, 4):
        clock.now += 1
        observe.commit({}, part)
        observe.published(version)
    assert saved == [(4, 3, [2], 1)]  # two rows and one evaluation were written before
    state = observe.state_dict()
    quiet = {"lengths": [5.0, 5.0], "rewards": [4 / 3, 4 / 3], "ringing": [], "skipped": 0}
    assert state == {"step": 2, "tokens": 2 * 18, "version": 4, "alarms": quiet}
    again, clock, saved = watching()
    again.load_state_dict(state)
    for version in (6, 8):
        clock.now += 1
        again.commit({}, part)
        again.published(version)
    assert [version for version, *_ in saved] == [6] and again.step == 4 and again.tokens == 4 * 18


def test_the_stopwatch_counts_a_call_that_fails():
    clock = Clock()
    watch = Stopwatch(clock, lambda: clock.now * 1.5)

    def fail():
        clock.now += 2
        raise KeyError

    with pytest.raises(KeyError):
        watch.timing("gen", fail)()
    clock.now += 1
    assert watch.drain() == {"timing_s/gen": 2, "timing_s/step": 3, "perf/host_cores_busy": 1.5}
    assert watch.drain() == {"timing_s/step": 0, "perf/host_cores_busy": 0}


def test_what_is_done_within_a_phase_is_overlapped():
    clock = Clock()
    watch = Stopwatch(clock, lambda: 0.0)
    heard = []
    watch.listeners.append(lambda phase, begun, ended: heard.append((phase, begun, ended)))

    def takes(seconds, then=None):
        clock.now += seconds
        if then:
            then()

    watch.timing("gen", takes)(1, lambda: watch.timing("reward", takes)(2))
    watch.timing("reward", takes)(4)
    assert watch.drain() == {
        "timing_s/gen": 3,
        "timing_s/overlapped": 2,
        "timing_s/reward": 4,
        "timing_s/step": 7,
        "perf/host_cores_busy": 0,
    }
    assert heard == [("reward", 1, 3), ("gen", 0, 3), ("reward", 3, 7)]


def test_a_learner_apart_is_looked_at_before_and_after_dispatches():
    """At work from 2 on, seen at 3; still at 5; done at 8, seen at 9: half of the intervals where it changed. At work again, seen
    at 13, till the ring has waited for it, from 14 to 20: all of that. An evaluation from 20 to 80 is no work of it."""
    clock = Clock()
    watch, spans = Stopwatch(clock, lambda: 0.0), []
    looks = iter([False, True, True, False, False, True, False, False, False])
    watch.listeners.append(lambda *span: spans.append(span))
    at_work = AtWork(lambda: next(looks), watch)

    def until(now):
        clock.now = now

    for now, look in (
        (1, at_work.stepping),
        (3, lambda clock: at_work.stepped([], clock)),
        (5, at_work.stepping),
        (9, lambda clock: at_work.stepped([], clock)),
        (11, at_work.stepping),
        (13, lambda clock: at_work.stepped([], clock)),
    ):
        clock.now = now
        look(0)
    watch.timing("update_actor", until)(20)
    watch.timing("testing", until)(80)
    at_work.stepping(0)
    assert [span[1:] for span in spans if span[0] == "train"] == [(2, 3), (3, 5), (5, 7), (12, 13), (13, 20)]
    assert watch.drain() == {
        "timing_s/train": 13,
        "timing_s/update_actor": 7,
        "timing_s/testing": 60,
        "timing_s/step": 80,
        "perf/host_cores_busy": 0,
    }


UNSCORED = Group(prompt=GROUPS[0].prompt, rollouts=GROUPS[0].rollouts, rewards=[0, 0], scored=[False, False])


def test_a_first_round_without_a_score_is_refused():
    first = FirstScores(3)
    first.scored(UNSCORED), first.scored(UNSCORED)
    with pytest.raises(NoScores, match="none of the first 3 groups' 6 rollouts could be scored"):
        first.scored(UNSCORED)


@pytest.mark.parametrize("scored", [(1, 0, 0, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0)])
def test_one_score_in_the_first_round_is_enough(scored):
    first = FirstScores(3)
    for one in scored:
        first.scored(GROUPS[0] if one else UNSCORED)
