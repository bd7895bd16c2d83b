"""Where a test has many cases of one kind, every n-th runs in each run of the tests; all run with ``-m thorough``.

The laws (``tests/test_laws.py``, ``tests/codecs/test_laws.py``) are thinned only where they run over sockets as well.
"""

from collections import Counter

import pytest

EVERY = {
    "backward/test_factor_passes.py": 3,
    "benchmarks/test_error.py::test_gradients_of_resnet": 0,
    "benchmarks/test_error.py::test_picture": 0,
    "codecs/packing/test_integer_codes.py::test_rice_round_trip_of_many": 3,
    "codecs/quantize/test_quantisers.py::test_unbiased": 2,
    "codecs/test_memory.py": 2,
    "codecs/test_reference.py": 2,
    "collectives/test_wire.py::test_interface_counters_agree": 3,
    "config/test_every_yaml.py::test_composes_and_builds": 2,
    "config/test_every_yaml.py::test_head_comment_has_a_command_that_composes": 3,
    "config/test_sweeps.py::test_a_cell_trains": 3,
    "config/test_sweeps.py::test_cells_compose": 2,
    "conformance/test_callbacks.py": 2,
    "conformance/test_ddp_hooks.py": 2,
    "conformance/test_skipped_steps.py": 2,
    "conformance/test_trainers.py::test_a_learning_rate_finder_in_between_leaves_no_trace": 3,
    "contrib": 4,
    "contrib/asynchronous/test_strategy.py::test_one_model_is_evaluated_and_left": 1,
    "engine/test_accumulation.py": 2,
    "engine/test_attach.py::test_residuals_of_owners_stay_small_where_one_rank_alone_has_a_gradient": 2,
    "engine/test_delayed.py::test_every_codec_trains_nearly_as_well": 3,
    "engine/test_groups.py::test_what_is_dense_is_sent_in_its_own_dtype": 3,
    "engine/test_staggered.py::test_nothing_is_lost": 3,
    "engine/test_staggered.py::test_training_in_lightning": 2,
    "engine/test_unused.py": 2,
    "exchanges/test_prices.py": 3,
    "exchanges/test_straight.py": 2,
    "faults/test_faults.py::test_nothing_is_lost": 2,
    "fuzz": 3,
    "golden_checkpoints": 2,
    "gossip/test_algorithms.py": 2,
    "gossip/test_moniqua.py": 2,
    "gossip/test_stress.py::test_ranks_stay_as_near_as_in_float32_or_it_is_refused": 3,
    "periodic/test_local_sgd.py": 2,
    "recipes/test_results.py::test_every_run_composes": 2,
    "recipes/test_resume.py": 2,
    "recipes/test_simulation.py": 2,
    "recipes/test_train.py::test_killing_the_first_process_ends_the_others": 0,
    "recipes/test_train.py::test_parameters_of_another_precision": 2,
    "recipes/test_train.py::test_what_a_page_shows_has_an_effect": 2,
    "settings/test_errors.py": 2,
    "strategies/test_delay.py::test_resumes_bit_for_bit": 3,
    "strategies/test_gossip.py::test_a_resumed_run_is_the_uninterrupted_one": 2,
    "strategies/test_interruptions.py": 2,
    "strategies/test_local_sgd.py::test_a_resumed_run_is_the_uninterrupted_one": 2,
    "strategies/test_local_sgd.py::test_checkpoints_early_stopping_and_monitors": 2,
    "strategies/test_local_sgd.py::test_ranks_evaluate_one_model_and_end_on_one": 2,
    "strategies/test_local_sgd.py::test_what_is_unfrozen_in_a_fit_is_averaged_from_then_on": 2,
    "strategies/test_recount.py": 2,
    "strategies/test_resume.py::test_bit_for_bit": 3,
    "strategies/test_resume.py::test_everything_that_is_kept": 2,
    "strategies/test_strategy.py::test_every_method_trains_and_ranks_stay_identical": 2,
    "test_default_dtype.py": 2,
    "test_laws.py::test_the_same_over_sockets": 2,
    "test_simulation.py": 0,
    "test_testing.py::test_a_broken_law_is_named": 2,
    "test_testing.py::test_ours_pass": 2,
    "triton": 3,
    "triton/test_compiled.py": 0,
}
"""One of how many cases of a test runs, by folder, file or test under ``tests``; 0: none. A test of one case runs."""


def _share(name):
    """Return the entry for a test: its own, or that of its file or folder."""
    path, test = name.removeprefix("tests/").split("::", 1)
    parts = path.split("/")
    places = [f"{path}::{test}", path, *("/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))]
    return next((EVERY[place] for place in places if place in EVERY), 1)


def mark_thorough(items):
    """Leave all cases but every n-th to the thorough tests.

    Args:
        items: the collected tests.
    """
    seen = Counter()
    for item in items:
        if item.get_closest_marker("thorough"):
            continue
        name = item.nodeid.split("[")[0]
        share = _share(name)
        if share != 1 and (not share or seen[name] % share):
            item.add_marker(pytest.mark.thorough)
        seen[name] += 1
