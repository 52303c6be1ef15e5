"""Which test shows what the public behaviour cases ask for, and which cases have no subject here."""

from __future__ import annotations

from typing import Final

BEHAVIOUR: Final[dict[str, str]] = {
    "t-template-10": "unit/test_data_templates.py::test_a_template_that_rewrites_history_is_refused",
    "t-template-15": "unit/test_batching.py::test_prompts_are_padded_on_the_left",
    "t-template-16": "unit/test_data_templates.py::test_the_tokenizer_repeats_and_survives_saving",
    "t-loss-07": "unit/test_supervised.py::test_rows_that_are_too_long_are_named_and_all_of_them_is_an_error",
    "t-loss-08": "unit/test_unscorable.py::test_a_mini_batch_without_a_score_is_passed_over",
    "t-rl_math-04": "cases/test_train_numbers.py::test_no_estimator_blows_up_float_noise_or_an_odd_reward",
    "t-rl_math-05": "cases/test_train_numbers.py::test_no_estimator_blows_up_float_noise_or_an_odd_reward",
    "t-rl_math-06": "golden/test_methods.py::test_estimators_that_compare_siblings_get_at_least_two",
    "t-rl_math-25": "unit/test_collector.py::test_unscorable_rollouts_leave_the_batch",
    "t-rl_math-26": "unit/test_alarms.py::test_an_alarm_is_raised_by_its_own_cause_alone",
    "t-config-02": "unit/test_config_load.py::test_refused_overrides_say_what_and_where",
    "t-config-04": "unit/test_config_load.py::test_a_misspelt_key_is_named_before_what_it_leaves_missing",
    "t-config-07": "unit/test_config_load.py::test_bad_files_are_one_line",
    "t-config-09": "unit/test_preflight.py::test_what_this_machine_cannot_do",
    "t-config-11": "unit/test_config_load.py::test_switches_that_do_not_go_together_are_refused",
    "t-config-15": "cases/test_train_files.py::test_there_is_no_batch_triple_to_get_wrong",
    "t-config-16": "unit/test_preflight.py::test_empty_data_and_folders_without_a_model",
    "t-config-17": "unit/test_config_load.py::test_refused_overrides_say_what_and_where",
    "t-checkpoint-09": "faults/test_resume.py::test_checkpoints_of_something_else_are_refused",
    "t-checkpoint-10": "faults/test_resume.py::test_an_interrupted_stage_goes_on_as_if_nothing_had_happened",
    "t-checkpoint-11": "faults/test_resume.py::test_an_interrupted_stage_goes_on_as_if_nothing_had_happened",
    "t-checkpoint-16": "unit/test_supervised.py::test_a_model_that_is_not_finite_is_not_saved",
    "t-weights-01": "unit/test_stages.py::test_the_model_loads_where_this_project_is_absent",
    "t-weights-05": "unit/test_lora.py::test_merging_keeps_the_logits_and_leaves_the_model_alone",
    "t-weights-06": "unit/test_lora.py::test_the_published_folders_load_with_plain_libraries",
    "t-weights-11": "unit/test_preference.py::test_the_loss_is_that_of_plain_log_probs_and_leaves_the_reference_alone",
    "t-ranks-01": "unit/test_batching.py::test_ranks_share_every_row_once_and_agree_on_the_number_of_micro_batches",
    "t-ranks-02": "invariants/test_ranks.py::test_gradients_do_not_depend_on_how_they_are_computed",
    "t-ranks-03": "invariants/test_ranks.py::test_two_ranks_allocate_and_answer_as_one",
    "t-precision-04": "unit/test_supervised.py::test_a_number_that_is_not_finite_stops_the_run",
    "t-distillation-02": "cases/test_train_files.py::test_a_teacher_smaller_than_the_vocabulary_is_refused",
    "t-evaluation-01": "unit/test_evaluation.py::test_nothing_to_average_is_refused",
    "t-evaluation-05": "unit/test_rewards_math_answer.py::test_last_box",
    "t-orchestration-01": "flows/test_recipe_flow.py::test_a_killed_run_goes_on_from_its_checkpoint",
    "t-orchestration-02": "unit/test_cache.py::test_files_from_outside_enter_by_content",
    "t-orchestration-05": "flows/test_runs.py::test_a_failed_stage_is_one_line_and_an_exit_code",
    "t-tracking-02": "unit/test_tracking.py::test_different_names_stay_different",
    "t-tracking-05": "unit/test_tracking.py::test_what_mlflow_refuses_does_not_hold_up_the_rest",
}
"""Case id -> the test, under tests/."""

WITHOUT_SUBJECT: Final[dict[str, str]] = {
    "t-checkpoint-07": "no option names a checkpoint: a stage finds its own, by its key",
    "t-template-03": "no token is ever added to a model's vocabulary: pads carry token 0 under a mask",
    "t-weights-08": "no token is ever added to a model's vocabulary, so adapters never need its embedding",
    "t-weights-10": "no token is ever added to a model's vocabulary, at no ZeRO stage",
}
"""Case id -> why the fault cannot occur."""

OPEN: Final[frozenset[str]] = frozenset(
    {
        "t-rl_math-28",  # resampling of dead groups
        "t-rollout-02",
        "t-rollout-03",
        "t-evaluation-04",
        "t-ranks-07",
        "t-precision-03",  # fp16's scaler
        "t-precision-05",
        "t-orchestration-04",
        "t-tracking-03",
        "t-tracking-06",
    }
)
"""Not there yet."""
