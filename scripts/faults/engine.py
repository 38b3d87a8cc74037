"""Faults of engine/: the row plan, the row program, its host's side, what a step costs."""

from __future__ import annotations

from faults.fault import in_file

_EQUAL = ("test_agrees_with_the_independent_sampler",)

FAULTS = (
    *in_file(
        "jaxrl_post/engine/row_plan.py",
        (
            "floor_for_ceil",
            "value_fill",
            "xp.ceil(values * VALUE_STEPS)",
            "xp.floor(values * VALUE_STEPS)",
            "a small chance is none",
            "test_values_of_one_and_below_a_step",
        ),
        (
            "fewer_bisection_steps",
            "value_fill",
            "range(VALUE_STEPS.bit_length())",
            "range(VALUE_STEPS.bit_length() - 1)",
            "certain drafts overrun the budget",
            "test_values_of_one_and_below_a_step",
        ),
        (
            "one_bit_less",
            "counts",
            "max(1, rows.bit_length())",
            "max(1, rows.bit_length() - 1)",
            "a slot cannot get all rows",
            "test_one_slot_may_have_every_row",
        ),
        (
            "youngest_first",
            "counts",
            "prefill[order]) - prefill[order]",
            "prefill) - prefill",
            "prefill is served by slot, not by age",
            "test_counts_equal_the_rules_by_hand",
        ),
        (
            "drafts_behind_a_cut_prefill",
            "counts",
            "(forced > 0) & (base == forced)",
            "(forced > 0)",
            "a slot whose prefill was cut gets drafts",
            "test_counts_equal_the_rules_by_hand",
        ),
        (
            "odd_ones_to_the_last",
            "level_fill",
            "xp.cumsum(more) <= left",
            "xp.cumsum(more) >= left",
            "odd rows do not go to the oldest",
            "test_counts_equal_the_rules_by_hand",
        ),
        (
            "head_of_the_next_slot",
            "plan",
            "end - sampling[head_slot] + head_rank",
            "end - sampling[head_slot] + head_rank + 1",
            "a head reads the row behind its own",
            "test_counts_equal_the_rules_by_hand",
        ),
    ),
    *in_file(
        "jaxrl_post/engine/step_cost.py",
        (
            "drafts_without_their_cost",
            "best_size",
            "cost(size) + cost.drafting + opening",
            "cost(size)",
            "what the drafter takes is left out",
            "test_drafts_are_made_where_they_bring_more_than_they_cost",
        ),
        (
            "too_small_a_size",
            "best_size",
            "if size >= running",
            "if size >= running - 1",
            "a slot gets no row",
            "test_the_choice_is_that_of_brute_force",
        ),
        (
            "memory_or_arithmetic",
            "DecodeCost.__call__",
            "np.maximum(self.weights_s + context * self.token_s, rows * self.row_s)",
            "np.minimum(self.weights_s + context * self.token_s, rows * self.row_s)",
            "the faster of both",
            "test_a_decode_step_by_hand",
        ),
    ),
    *in_file(
        "jaxrl_post/engine/host/pages.py",
        (
            "pages_rounded_down",
            "Pages.needed",
            "-(-positions // self.size)",
            "positions // self.size",
            "the last, partly filled page is not counted",
            "test_needed_and_double_release",
        ),
        (
            "released_while_held",
            "Pages.release",
            "if self._counts[i] == 0:",
            "if self._counts[i] <= 1:",
            "a page that another holds is free",
            "test_counts_balance",
        ),
        (
            "unfinished_prompts_stay",
            "Prompts.abandon",
            "e.leader == slot and not e.ready",
            "e.leader == slot and e.ready",
            "pages that nobody will compute are waited for",
            "test_shared_prompts_live_as_long_as_somebody_needs_them",
        ),
    ),
    *in_file(
        "jaxrl_post/engine/host/replica.py",
        (
            "last_page_shared",
            "Replica.seat",
            "sequence.shared // pages.size if entry else 0",
            "pages.needed(sequence.shared) if entry else 0",
            "the partly filled page is shared, not copied",
            "test_a_half_full_page_is_copied",
        ),
        (
            "oldest_is_the_victim",
            "Replica.victim",
            "[-1]",
            "[0]",
            "the oldest makes room",
            "test_the_victim_is_the_youngest_that_is_younger_and_of_this_version",
        ),
    ),
    *in_file(
        "jaxrl_post/engine/host/sequence.py",
        (
            "overrun_kept",
            "SequenceState.cut",
            "del getattr(self, name)[length:]",
            "del getattr(self, name)[length + 1 :]",
            "a token behind a stop string stays",
            "test_forced_tokens_keep_their_clocks_and_new_ones_get_their_own",
        ),
        (
            "checked_too_late",
            "SequenceState.stopped_at",
            "range(checked + 1, len(self.tokens) + 1)",
            "range(checked + 2, len(self.tokens) + 1)",
            "the first token of a dispatch completes no stop string",
            "test_stop_strings_do_not_depend_on_the_dispatch_length",
        ),
    ),
)
