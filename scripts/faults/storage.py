"""Faults of checkpoint/."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "jaxrl_post/checkpoint/signed_files.py",
        (
            "manifest_unchecked",
            "listed",
            "not hmac.compare_digest(given, _signature(files, step, key).encode())",
            "False",
            "a manifest that was changed is believed",
            "test_a_manifest_that_forgot_a_file_is_found",
        ),
        (
            "bytes_unchecked",
            "damage",
            'digest != about["blake2b"]',
            "False",
            "a flipped byte is not seen",
            "test_damage_to_any_file_is_found",
        ),
        (
            "all_read_the_same",
            "damage",
            "[number::count]",
            "[::count]",
            "processes read the same share of the files, and no other",
            "test_checkpoint_signed_files.py",
        ),
    ),
    *in_file(
        "jaxrl_post/checkpoint/store.py",
        (
            "one_step_less",
            "Checkpoints._delete_old",
            "whole[: -self._keep]",
            "whole[: 1 - self._keep]",
            "one step too few stays",
            "test_the_last_two_whole_ones_stay_until_there_is_a_newer_one",
        ),
        (
            "renamed_before_it_is_whole",
            "Checkpoints._save",
            "_write_json(part / MANIFEST, manifest(part, step, self._key(), own))",
            "os.replace(part, path), _write_json(path / MANIFEST, manifest(path, step, self._key(), own)), os.replace(path, part)",
            "a step has its name before its manifest",
            "test_killed_at_every_file_operation_of_a_save",
        ),
        (
            "leftovers_stay",
            "Checkpoints._remove_leftovers",
            "_remove(leftover)",
            "pass",
            "half-written steps stay",
            "test_killed_at_every_file_operation_of_a_save",
        ),
        (
            "oldest_step",
            "Checkpoints._newest",
            'max(self.steps(), default="")',
            'min(self.steps(), default="")',
            "the oldest step is restored",
            "test_what_was_saved_comes_back",
        ),
    ),
    *in_file(
        "jaxrl_post/checkpoint/arrays.py",
        (
            "shapes_unchecked",
            "kinds",
            "{leaf.dtype}{list(leaf.shape)}",
            "{leaf.dtype}",
            "another shape is restored",
            "test_checkpoint_store.py::test_another_tree_is_refused",
        ),
    ),
    *in_file(
        "jaxrl_post/checkpoint/host_state.py",
        (
            "arrays_of_one_name",
            "_plain",
            'arrays[f"a{len(arrays)}"] = value',
            'arrays["a0"] = value',
            "the last array stands for all",
            "test_state_of_the_host",
        ),
        (
            "scalars_refused",
            "_plain",
            "value.item() if isinstance(value, np.generic) else value",
            "value",
            "numpy scalars are refused",
            "test_state_of_the_host",
        ),
    ),
    *in_file(
        "jaxrl_post/checkpoint/identity.py",
        (
            "steps_may_shrink",
            "check_same",
            "new >= max(old, step)",
            "new >= step",
            "a run may end earlier than it was to",
            "test_a_change_is_refused_field_by_field",
        ),
        (
            "extra_columns_forgotten",
            "fingerprint",
            "prompt.messages, prompt.extra]",
            "prompt.messages]",
            "other columns may change",
            "test_every_column_of_the_data_is_in_its_fingerprint",
        ),
    ),
    *in_file(
        "jaxrl_post/checkpoint/log_marks.py",
        (
            "later_logs_stay",
            "rewind",
            "(folder / name).unlink(missing_ok=True)",
            "pass",
            "a log that was not there stays",
            "test_logs_go_back_to_where_they_were",
        ),
        (
            "lost_lines_are_no_matter",
            "check_reach",
            "there < size",
            "False",
            "a log that lost lines is gone on with",
            "test_a_log_that_lost_lines_is_refused_and_nothing_is_cut",
        ),
    ),
)
