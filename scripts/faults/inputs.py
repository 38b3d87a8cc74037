"""Faults of data/, and of what launch/ reads from it."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "jaxrl_post/data/overlong.py",
        (
            "limit_off_by_one",
            "Overlong.fitted",
            "0 < len(ids) <= limit",
            "0 < len(ids) < limit",
            "a prompt of just the limit is refused",
            "test_rows_that_cannot_be_prompts",
        ),
        (
            "the_left_end_stays",
            "Overlong.fitted",
            "ids[-limit:]",
            "ids[:limit]",
            "a prompt that is cut loses its question",
            "test_they_are_cut_at_the_left",
        ),
        (
            "nothing_is_counted",
            "Overlong.fitted",
            "self.places.append(place)\nreturn [] if self.mode == DROP else ids[-limit:]",
            "return [] if self.mode == DROP else ids[-limit:]",
            "prompts are dropped in silence",
            "test_they_are_dropped_and_counted",
        ),
    ),
    *in_file(
        "jaxrl_post/data/prompts.py",
        (
            "one_order_for_all_seeds",
            "Prompts.__init__",
            'f"prompts{seed}"',
            '"prompts"',
            "every seed has the same order",
            "test_every_epoch_is_another_permutation_and_a_function_of_seed",
        ),
        (
            "first_epoch_for_ever",
            "Prompts.at",
            "position // len(self._prompts)",
            "0",
            "the epoch never advances",
            "test_every_epoch_is_another_permutation_and_a_function_of_seed",
        ),
        (
            "ids_may_repeat",
            "tokenised",
            'seen[row["id"]] = place',
            "pass",
            "an id may come twice",
            "test_rows_that_cannot_be_prompts",
        ),
    ),
    *in_file(
        "jaxrl_post/data/tasks.py",
        (
            "eval_problems_in_training",
            "_distinct",
            "split_of(prompt) == split and",
            "",
            "held-out problems are trained on",
            "test_splits_share_no_problem_whatever_the_seed",
        ),
        (
            "last_steps_missing",
            "work_out",
            "range(2, len(terms) + 1)",
            "range(3, len(terms) + 1)",
            "a sum is worked out with a step left out",
            "test_careful_solution",
        ),
    ),
    *in_file(
        "jaxrl_post/launch/sources.py",
        (
            "held_out_pairs_from_training",
            "completions",
            '"eval-sft" if solves else "eval"',
            '"sft"',
            "held-out completions are of the split that is trained on",
            "test_pairs_of_a_task_are_of_problems_that_no_training_draws",
        ),
    ),
    *in_file(
        "jaxrl_post/launch/completions.py",
        (
            "observed_tokens_count",
            "_of_solutions",
            "logps[r.id][r.sampled].sum(dtype=float)",
            "logps[r.id].sum(dtype=float)",
            "tokens that are only shown count in the loss",
            "test_the_loss_of_solutions_is_a_mean_over_tokens",
        ),
        (
            "no_reference",
            "_of_pairs",
            "learner.logprobs(held_out, of_reference=True)",
            "logps",
            "the policy is its own reference",
            "test_figures_of_pairs_are_those_of_trl",
        ),
    ),
    *in_file(
        "jaxrl_post/data/columns.py",
        (
            "second_name_first",
            "Columns.first",
            "for name in self.of(role)",
            "for name in reversed(self.of(role))",
            "the second column fills a role",
            "test_the_first_column_of_a_role_wins",
        ),
        (
            "template_of_any_message",
            "Columns._shaped",
            ' and last["role"] == "user"',
            "",
            "an assistant's message is put into the template",
            "test_a_template_is_for_the_user_s_last_word",
        ),
        (
            "answer_goes_to_extra",
            "Columns._others",
            'and name != "answer"',
            "",
            "the answer is among the extras",
            "test_gsm8k_through_the_mapping",
        ),
    ),
    *in_file(
        "jaxrl_post/data/files.py",
        (
            "lines_from_0",
            "_lines",
            "enumerate(lines, start=1)",
            "enumerate(lines)",
            "an error names the line before",
            "test_parquet_says_what_jsonl_says",
        ),
    ),
)
