"""Faults of trainer/ and of the loop over layers: the learner, the split head, the optimizer."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "jaxrl_post/trainer/learner.py",
        (
            "closed_gate_keeps_the_sums",
            "Learner.commit",
            'self._sums = self._programs["zeros"]()',
            "pass",
            "the gate closes but the sums are not emptied: weights move anyway",
            "test_a_closed_gate_leaves_every_bit_and_empties_the_sums",
        ),
    ),
    *in_file(
        "jaxrl_post/models/layer_loop.py",
        (
            "every_layer_has_the_first_window",
            "_scanned",
            "[windows[index] for index in whose]",
            "[windows[0]]",
            "in the scan every layer sees what the first one does",
            "test_scanned_gradients_are_those_of_layers_written_out_in_x64",
        ),
        (
            "every_layer_turns_as_the_first",
            "_chosen",
            "jnp.stack(parts)[kind]",
            "parts[0]",
            "in the scan every layer rotates by the first theta",
            "test_scanned_gradients_are_those_of_layers_written_out_in_x64",
        ),
        (
            "norms_are_rounded",
            "_stack",
            "whole if leaves[0].ndim == 1 else whole.astype(dtype)",
            "whole.astype(dtype)",
            "the weights of norms lose digits in the stack",
            "test_norms_are_stacked_as_they_are_and_matrices_in_the_dtype_of_the_computation",
        ),
        (
            "nothing_is_kept",
            "",
            "_KEEP.save_only_these_names(ATTENDED, PROJECTED)",
            "None",
            "the policy projections is full remat",
            "test_a_policy_keeps_what_it_says",
        ),
    ),
    *in_file(
        "jaxrl_post/trainer/split_head.py",
        (
            "maximum_of_one_part",
            "_laws_of_shard",
            "jax.lax.pmax(jnp.max(scores, axis=-1, keepdims=True), meshes.VOCAB_SHARDS)",
            "jnp.max(scores, axis=-1, keepdims=True)",
            "the parts of the sum are not of the same scale",
            "test_values_and_gradients_are_those_of_the_whole_head_in_x64",
        ),
        (
            "gradient_of_one_part",
            "_slopes_of_shard",
            "jax.lax.psum(of_rows, meshes.TENSOR)",
            "of_rows",
            "the gradient of the activations lacks the parts along tensor",
            "test_values_and_gradients_are_those_of_the_whole_head_in_x64",
        ),
        (
            "gradient_of_some_rows",
            "_slopes_of_shard",
            "jax.lax.psum(of_matrix, meshes.DATA)",
            "of_matrix",
            "the gradient of the matrix lacks the rows of other data shards",
            "test_values_and_gradients_are_those_of_the_whole_head_in_x64",
        ),
        (
            "entropy_by_its_first_term",
            "_slopes_of_shard",
            "law * (logs + entropy)",
            "law * logs",
            "the gradient of the entropy lacks that of the normaliser",
            "test_values_and_gradients_are_those_of_the_whole_head_in_x64",
        ),
        (
            "soft_cap_is_straight",
            "_Head.scores",
            "self.cap * bent, 1 - bent * bent",
            "self.cap * bent, slope",
            "the gradient passes the soft cap undiminished",
            "test_values_and_gradients_are_those_of_the_whole_head_in_x64",
        ),
        (
            "padding_is_scored",
            "_Head.scores",
            "ids < (self.used or self.vocab)",
            "ids < self.vocab",
            "ids without a meaning have a probability",
            "test_values_and_gradients_are_those_of_the_whole_head_in_x64",
        ),
    ),
    *in_file(
        "jaxrl_post/trainer/optimizer.py",
        (
            "moments_are_never_widened",
            "_kept_in",
            "steps, state = inner.update(grads, wide, params)",
            "steps, state = inner.update(grads, state, params)",
            "moments are computed in the format in which they are kept",
            "test_moments_in_bfloat16_are_float32_arithmetic_rounded_once_a_step",
        ),
    ),
)
