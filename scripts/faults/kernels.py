"""Faults of kernels/: the sampling law, thresholds, attention, the tiles of the kernels."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "kernels/thresholds.py",
        (
            "top_p_must_be_exceeded",
            "find",
            "jnp.sum(jnp.where(seen, weight, 0.0), axis=-1) >= enough",
            "jnp.sum(jnp.where(seen, weight, 0.0), axis=-1) > enough",
            "a share that is met exactly is not enough",
            "test_a_share_that_is_met_exactly_is_enough",
        ),
        (
            "top_k_one_more",
            "find",
            "jnp.minimum(top_k, vocab)",
            "jnp.minimum(top_k + 1, vocab)",
            "one id too many",
            "test_ties_at_the_threshold_are_all_kept",
        ),
        (
            "top_p_of_the_whole",
            "find",
            "jnp.where(keys >= kept[:, None], weight, 0.0)",
            "weight",
            "the share is of all ids, not of those that top-k left",
            "test_with_thresholds_agrees_with_the_twin_that_sorts",
        ),
    ),
    *in_file(
        "kernels/sampling.py",
        (
            "noise_of_the_slot",
            "sample",
            "gumbel(seeds, positions, ids.astype(jnp.uint32))",
            "gumbel(seeds, jnp.arange(rows, dtype=positions.dtype), ids.astype(jnp.uint32))",
            "noise is keyed by the row, not by the position",
            "test_agrees_with_the_twin",
        ),
        (
            "noise_at_temperature_0",
            "sample",
            "jnp.where(greedy[:, None], 0.0, gumbel(seeds, positions, ids.astype(jnp.uint32)))",
            "gumbel(seeds, positions, ids.astype(jnp.uint32))",
            "greedy draws",
            "test_agrees_with_the_twin",
        ),
        (
            "no_tile_tag",
            "sample",
            "+ jnp.uint32(TILE_TAG)",
            "",
            "tiles and ids share their noise",
            "test_agrees_with_the_twin[2053]",
        ),
        (
            "ties_to_the_highest",
            "first_highest",
            "jnp.min(jnp.where(highest, jnp.arange(width, dtype=jnp.int32), width - 1), axis=-1)",
            "jnp.max(jnp.where(highest, jnp.arange(width, dtype=jnp.int32), 0), axis=-1)",
            "ties go to the highest id",
            "test_ties_go_to_the_lowest_id",
        ),
        (
            "entropy_sign",
            "sample",
            "lse - jnp.sum(share * moment, axis=-1) / total",
            "lse + jnp.sum(share * moment, axis=-1) / total",
            "the entropy's second term is added",
            "test_agrees_with_the_twin",
        ),
        (
            "cut_in_the_log_prob_only",
            "sample",
            "jnp.where(logits >= thresholds[:, None], scaled, -jnp.inf)",
            "jnp.where(logits > thresholds[:, None], scaled, -jnp.inf)",
            "the last id that is kept is dropped",
            "test_with_thresholds_agrees_with_the_twin_that_sorts",
        ),
    ),
    *in_file(
        "kernels/attention.py",
        (
            "own_position_unseen",
            "reference",
            "at[None, :] < live[:, None]",
            "at[None, :] < live[:, None] - 1",
            "a row does not see itself",
            "test_equals_plain_softmax",
        ),
        (
            "window_off_by_one",
            "reference.block",
            "(rows.position - window)[:, None]",
            "(rows.position - window - 1)[:, None]",
            "the window is one wider",
            "test_equals_plain_softmax",
        ),
        (
            "no_shrink",
            "reference.block",
            "out * shrink[..., None] + mixed",
            "out + mixed",
            "a higher peak does not shrink what was summed",
            "test_equals_plain_softmax",
        ),
        (
            "stale_values_count",
            "reference.block",
            "jnp.where(seen[:, 0, 0, :, None, None], values, 0)",
            "values",
            "0 times an infinite stale value",
            "test_stale_values_may_be_infinite",
        ),
        (
            "unreal_rows_written",
            "write",
            "jnp.where(rows.real, rows.table[rows.slot, rows.position // page], pages)",
            "rows.table[rows.slot, rows.position // page]",
            "rows that are not real are written",
            "test_write_drops_unreal_rows_and_copy_drops_pages_out_of_range",
        ),
    ),
    *in_file(
        "kernels/tiles.py",
        (
            "noise_of_the_part",
            "_inside",
            "column + first * TILE",
            "column",
            "each part of a vocabulary draws the same noise",
            "test_a_vocabulary_in_parts_is_drawn_from_as_a_whole",
        ),
    ),
    *in_file(
        "kernels/threefry.py",
        ("a_rotation", "", "(13, 15, 26, 6)", "(13, 15, 26, 7)", "another cipher", "test_threefry_known_answers"),
    ),
)
