"""Faults of sim/: the engine without a device, its rollouts, its pace, the twin."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "jaxrl_post/sim/engine.py",
        (
            "oldest_makes_room",
            "SimEngine._preempt",
            "max(replica.running(), key=lambda one: one.order)",
            "min(replica.running(), key=lambda one: one.order)",
            "the oldest is put out",
            "test_where_the_memory_is_full_the_youngest_waits",
        ),
        (
            "prefill_is_free",
            "SimEngine._seat",
            "self._pace.stall(forced)",
            "0",
            "a prefill takes no time",
            "test_a_prefill_holds_its_replica_up",
        ),
        (
            "verify_keeps_all",
            "SimEngine._begin",
            "agreement(kept.tokens, self.answers.path(request.rollout_id, request.prompt, now))",
            "len(kept)",
            "candidates that the new weights refuse are kept",
            "test_what_is_verified_costs_what_the_new_weights_refuse",
        ),
        (
            "the_slowest_event",
            "SimEngine.step",
            "self._due.min()",
            "self._due[np.isfinite(self._due)].max() if np.isfinite(self._due).any() else np.inf",
            "the clock jumps over events",
            "test_events_are_those_of_an_engine_that_goes_token_by_token",
        ),
    ),
    *in_file(
        "jaxrl_post/sim/answers.py",
        (
            "agreement_off_by_one",
            "agreement",
            "int(different.argmax()) if different.any() else count",
            "int(different.argmax()) + 1 if different.any() else count",
            "a token that differs is kept",
            "test_the_first_difference_is_geometric_and_all_before_it_is_equal",
        ),
        (
            "changes_what_is_kept",
            "Answers._changed",
            "if first < kept:",
            "if False:",
            "weights change tokens that are there",
            "test_what_is_written_is_kept_and_the_rest_is_sampled_by_the_new_version",
        ),
        (
            "noise_of_the_place_alone",
            "noise",
            "for word in (version, place, 0)",
            "for word in (place, 0)",
            "every version draws the same",
            "test_noise_is_uniform_and_each_word_counts",
        ),
    ),
    *in_file(
        "jaxrl_post/sim/pace.py",
        (
            "drafts_cost_no_rows",
            "DraftSpeed.rows",
            "running * (1 + self.width)",
            "running",
            "drafts take no rows",
            "test_drafts_take_rows",
        ),
        (
            "mean_of_the_replicas",
            "LockStep.seconds",
            "self._cost(self._drafts.rows(running), context).max()",
            "self._cost(self._drafts.rows(running), context).mean()",
            "a step lasts as long as the average replica's",
            "test_seconds_follow_the_cost_of_the_slowest_replica",
        ),
    ),
    *in_file(
        "jaxrl_post/sim/twin.py",
        (
            "dispatch_goes_on",
            "_goes_on",
            "and not ready",
            "",
            "a prompt that is ready is not waited for",
            "test_the_twin_does_what_the_engine_does",
        ),
        (
            "mismatch_is_kept",
            "_step",
            "(sampled == guess) & ~ended & plan.head_real",
            "(guess >= 0) & ~ended & plan.head_real",
            "a candidate that is wrong goes on",
            "test_candidates_that_are_right_and_wrong",
        ),
    ),
)
