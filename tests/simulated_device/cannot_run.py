"""Tests that cannot run on the simulated device: a part of a test's id -> the reason.

One that is listed and passes there is an error, so that the list stays true.
"""

from __future__ import annotations

_CPU_LIST = "plants its fault by the CPU's autocast list; the device has CUDA's, which takes this op in fp32"
_NUMPY = "reads or writes a tensor through NumPy, which takes memory of the host only"
_SCRIPT = "needs a kernel that torch lacks: it cannot swap the weights of scripted code, as it does to move them there"

_PLANTED = {
    "test_the_first_nonfinite_value_is_where_it_was_planted": "reduction_overflow softplus_by_hand tiny_eps "
    "backward_of_an_inverse_root accumulation_of_gradients overflow_in_the_loss",
    "test_the_locator_names_module_cause_phase_op_and_line": "reduction_overflow softplus_by_hand tiny_eps "
    "backward_of_an_inverse_root accumulation_of_gradients overflow_in_the_loss",
    "test_the_samples_it_names_do_it_and_the_others_do_not": "reduction_overflow softplus_by_hand tiny_eps "
    "backward_of_an_inverse_root accumulation_of_gradients",
    "test_the_fault_shows_in_every_window_and_not_in_fp32": "reduction_overflow softplus_by_hand "
    "backward_of_an_inverse_root accumulation_of_gradients overflow_in_the_loss",
}

CANNOT_RUN = {
    **{
        f"test_planted_locator.py::{test}[{network}]": _CPU_LIST
        for test, networks in _PLANTED.items()
        for network in networks.split()
    },
    "test_peer_traps.py::test_no_sync_is_restored_after_an_exception": "needs collectives, which the device lacks",
    "test_bad_batches.py::test_buffers_go_back_however_the_module_changes_them[address": _NUMPY,
    "test_bad_batches.py::test_buffers_that_start_to_move_go_back_too[address": _NUMPY,
    "test_drift.py::test_an_output_that_must_not_need_a_gradient_is_left_alone": _NUMPY,
    "test_nonfinite.py::test_memory_that_is_changed_out_of_sight": _NUMPY,
    "test_census.py::test_an_lstm_counted_by_hand": "counts the ops of oneDNN's LSTM, which only a CPU has",
    "test_census.py::test_each_way_in_which_a_user_casts_is_the_users": _CPU_LIST,
    "test_drift.py::test_a_backward_that_overflows_at_any_scale_is_a_culprit": _CPU_LIST,
    "test_drift.py::test_what_follows_the_dtype_of_its_input_computes_as_in_the_low_run": _CPU_LIST,
    "test_nonfinite.py::test_an_eps_that_fp16_rounds_to_zero": _CPU_LIST,
    "test_nonfinite.py::test_overflow_in_a_reduction": _CPU_LIST,
    "test_nonfinite.py::test_the_recipes_own_loss": _CPU_LIST,
    "test_census.py::test_a_scripts_casts_cannot_be_told_apart": _SCRIPT,
    "test_census.py::test_modules_that_were_meant_to_be_low_and_are_not": _SCRIPT,
    "test_drift.py::test_compiled_and_scripted_modules": _SCRIPT,
    "test_lost_pins.py::test_a_decorated_class_deep_inside_a_script": _SCRIPT,
    "test_lost_pins.py::test_a_traced_module_that_was_pinned_when_it_was_traced": _SCRIPT,
    "test_lost_pins.py::test_pins_of_scripts_do_nothing": _SCRIPT,
    "test_lost_pins.py::test_what_torchscript_made_of_a_decorated_class_is_named_with_what_ran_low": _SCRIPT,
}
