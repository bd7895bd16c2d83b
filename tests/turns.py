"""Where a test has many cases of one kind, some run in each run of the tests, others next week; all ``-m thorough``.

The laws (``tests/test_laws.py``) run over a pairwise cover of their cases, which turns with the week too.
"""

import os
from collections import defaultdict
from datetime import date
from itertools import combinations
from random import Random

import pytest

VARIABLE = "LIGHTNING_COMPRESS_TURN"
TURN = int(os.environ.setdefault(VARIABLE, str(date.today().toordinal() // 7)))  # workers take the first process's
"""The number of the week, or of the week whose tests are to be repeated."""

REAL_RANKS = 4
"""One of how many cases of a test runs whose ranks are processes, if nothing below says otherwise: each takes long."""

EVERY = {
    "backward/test_factor_passes.py::*": 3,
    "backward/test_factor_passes.py::test_backwards_within_backwards": 6,
    "backward::*": 2,
    "benchmarks/test_commands.py": 1,
    "benchmarks/test_error.py::test_gradients_of_resnet": 0,
    "benchmarks/test_error.py::test_picture": 0,
    "benchmarks/test_error.py::test_sweeps_reach_the_same_bits": 0,
    "benchmarks/test_gpu.py::test_steps_are_measured": 0,
    "benchmarks/test_network.py::test_bits_of_shards_are_counted": 1,
    "benchmarks/test_scale.py::test_bytes_and_rounds_are_those_of_real_ranks": 6,
    "benchmarks::*": 3,
    "codecs/packing/test_entries.py::test_topk_equals_the_reference": 8,
    "codecs/packing/test_integer_codes.py::test_rice_round_trip_of_many": 3,
    "codecs/quantize/test_correlated.py": 3,
    "codecs/quantize/test_quantisers.py::test_rotated_equals_the_reference": 2,
    "codecs/quantize/test_quantisers.py::test_unbiased": 4,
    "codecs/sparse/test_rows.py": 2,
    "codecs/sparse/test_topk.py::test_a_sample_finds_what_a_look_at_all_does": 4,
    "codecs/sparse/test_topk.py::test_as_many_are_sent_as_were_asked_for": 4,
    "codecs/sparse/test_topk.py::test_the_accelerators_way_makes_the_same_choice": 4,
    "codecs/test_laws.py::test_conservation": 3,
    "codecs/test_laws.py::test_decode_sums_rows_in_order": 4,
    "codecs/test_laws.py::test_equal_vectors_and_keys_give_equal_bytes": 4,
    "codecs/test_laws.py::test_rows_end_anywhere_from_what_was_used": 2,
    "codecs/test_memory.py": 4,
    "codecs/test_reference.py": 2,
    "collectives/test_wire.py::test_gossip_sends_its_bits_to_two_neighbours": 2,
    "collectives/test_wire.py::test_interface_counters_agree": 9,
    "commands/test_doctor.py::test_a_codec_is_timed_alone_and_in_all_ranks": 0,
    "commands/test_doctor.py::test_a_fault_of_a_network_is_found": 5,
    "commands/test_doctor.py::test_a_healthy_network_gives_no_alarm": 6,
    "config/test_every_yaml.py::test_composes_and_builds": 8,
    "config/test_every_yaml.py::test_experiments_set_what_their_papers_do": 3,
    "config/test_every_yaml.py::test_head_comment_has_a_command_that_composes": 12,
    "config/test_sweeps.py::test_a_cell_trains": 3,
    "config/test_sweeps.py::test_cells_compose": 5,
    "config/test_sweeps.py::test_file": 2,
    "conformance/test_ddp_hooks.py::*": 4,
    "conformance/test_interrupted.py": 1,
    "conformance/test_interrupted.py::test_a_signal_in_the_middle_of_a_step_saves_a_whole_step_soon_after": 2,
    "conformance/test_trainers.py::test_a_learning_rate_finder_in_between_leaves_no_trace": 3,
    "conformance::*": 3,
    "contrib/asynchronous/test_strategy.py::test_a_rank_that_hangs_is_named_after_the_timeout": 1,
    "contrib/asynchronous/test_strategy.py::test_a_rank_that_is_killed_is_named_by_all_others": 1,
    "contrib/asynchronous/test_strategy.py::test_each_rank_goes_on_with_its_own_model_and_step": 1,
    "contrib/asynchronous/test_strategy.py::test_one_model_is_evaluated_and_left": 1,
    "contrib/asynchronous/test_strategy.py::test_sigterm_of_one_rank_ends_all_and_each_goes_on_from_its_step": 1,
    "contrib::*": 6,
    "core/test_memory_format.py::test_a_run_goes_on_in_another_memory_format": 2,
    "corrections/test_dgc.py": 3,
    "engine/test_delayed.py::*": 3,
    "engine/test_delayed.py::test_every_codec_trains_nearly_as_well": 12,
    "engine/test_delayed.py::test_what_does_more_than_compress_trains_nearly_as_well": 6,
    "engine/test_delayed_loops.py::*": 4,
    "engine/test_large.py": 3,
    "engine/test_modes.py::test_lossless_settings_are_stock_ddp_in_every_mode": 5,
    "engine/test_staggered.py::*": 2,
    "engine/test_staggered.py::test_nothing_is_lost": 4,
    "engine/test_unused.py": 6,
    "engine/test_unused.py::test_an_unused_parameter_keeps_its_state": 12,
    "examples/test_examples.py::*": 6,
    "examples/test_examples.py::test_readme_names_every_file": 1,
    "exchanges/sparse/test_same_elements.py": 3,
    "exchanges/test_adagrad.py::test_it_is_the_papers_with_two_residuals": 3,
    "exchanges/test_auto.py::test_ranks_whose_parts_of_a_node_differ_in_size_choose_alike": 3,
    "exchanges/test_exchanges.py::test_hierarchical_at_many_ranks": 4,
    "exchanges/test_prices.py": 16,
    "exchanges/test_straight.py": 2,
    "faults/test_failures.py": 1,
    "faults/test_faults.py::test_nothing_is_lost": 2,
    "front_ends/test_examples.py": 2,
    "front_ends/test_fabric.py::*": 3,
    "front_ends/test_hydra.py::*": 3,
    "front_ends/test_imports.py::test_every_name_may_be_imported_first": 3,
    "fuzz": 3,
    "golden_checkpoints": 2,
    "gossip/test_moniqua.py::test_the_toy_needs_slack_at_one_bit": 0,
    "gossip/test_stress.py::test_ranks_stay_as_near_as_in_float32_or_it_is_refused": 6,
    "gossip::*": 4,
    "installed/test_extending.py::*": 2,
    "installed/test_extending.py::test_every_block_is_tried_here": 1,
    "installed/test_wheel.py::*": 2,
    "installed/test_wheel.py::test_what_ships": 1,
    "kernels/test_kernels.py::test_same_sums": 3,
    "periodic::*": 3,
    "recipes/test_copied.py": 3,
    "recipes/test_minibatch.py::test_steps_grow_and_rates_with_them": 2,
    "recipes/test_nmt.py::test_what_is_logged": 2,
    "recipes/test_resume.py": 2,
    "recipes/test_simulation.py": 6,
    "recipes/test_sweep.py::*": 3,
    "recipes/test_sweep.py::test_goes_on_where_it_was_interrupted": 1,
    "recipes/test_sweep.py::test_what_a_sweep_file_may_not_say": 1,
    "recipes/test_train.py::test_killing_the_first_process_ends_the_others": 0,
    "recipes/test_train.py::test_parameters_of_another_precision": 4,
    "recipes/test_train.py::test_ranks_that_share_batches_count_epochs": 2,
    "recipes/test_train.py::test_what_a_page_shows_has_an_effect": 4,
    "recipes::*": 3,
    "settings/test_automatic.py::test_the_ratio_is_that_of_the_plans": 4,
    "strategies/test_delay.py::*": 3,
    "strategies/test_gossip.py::*": 3,
    "strategies/test_gossip.py::test_a_resumed_run_is_the_uninterrupted_one": 2,
    "strategies/test_gossip_sgp.py::*": 3,
    "strategies/test_gossip_sgp.py::test_it_learns_as_dpsgd_does": 0,
    "strategies/test_interruptions.py": 2,
    "strategies/test_local_sgd.py::*": 3,
    "strategies/test_local_sgd.py::test_a_resumed_run_is_the_uninterrupted_one": 3,
    "strategies/test_periodic.py::*": 3,
    "strategies/test_periodic.py::test_a_resumed_run_is_the_uninterrupted_one": 1,
    "strategies/test_recount.py::*": 3,
    "strategies/test_report.py::*": 3,
    "strategies/test_resume.py::test_a_damaged_part_of_one_rank": 1,
    "strategies/test_resume.py::test_bit_for_bit": 3,
    "strategies/test_resume.py::test_everything_that_is_kept": 2,
    "strategies/test_several_optimizers.py::*": 3,
    "strategies/test_stops.py::*": 12,
    "strategies/test_strategy.py::*": 3,
    "test_default_dtype.py::*": 8,
    "test_laws.py::test_a_flag_on_any_rank_reaches_every_rank": 2,
    "test_laws.py::test_auto_never_sends_more_than_dense": 3,
    "test_laws.py::test_gradients_of_any_scale_lose_the_same": 3,
    "test_laws.py::test_private_noise_averages_out": 3,
    "test_laws.py::test_two_shot_traffic_does_not_grow_with_the_ranks": 3,
    "test_laws.py::test_a_source_is_sent_as_its_sum": 3,
    "test_laws.py::test_what_is_named_compresses": 2,
    "test_simulation.py": 0,
    "test_testing.py::test_a_broken_law_is_named": 3,
    "test_testing.py::test_ours_pass": 4,
    "test_testing_reducers.py": 3,
    "triton/test_compiled.py": 0,
    "triton::*": 8,
}
"""One of how many cases of a test runs, by folder, file or test under ``tests``; 0: none. A test of one case runs.

``file::*`` or ``folder::*``: all its tests are the cases of one, but for those that another entry names more closely.
"""


def _place(name, default):
    """Return whose case a test is, its own without what stands in brackets or an entry's, and the entry's number."""
    test = name.removeprefix("tests/").split("[")[0]
    parts = test.split("::")[0].split("/")
    for place in (test, *("/".join(parts[:end]) for end in range(len(parts), 0, -1))):
        if place in EVERY:
            return test, EVERY[place]
        if (whole := f"{place}::*") in EVERY:
            return whole, EVERY[whole]
    return test, default


def mark_thorough(items):
    """Leave all cases but this turn's to the thorough tests.

    Args:
        items: the collected tests.
    """
    cases = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("thorough"):
            cases[_place(item.nodeid, REAL_RANKS if "pools" in item.fixturenames else 1)].append(item)
    for (_, share), own in cases.items():
        first = TURN % min(share, len(own)) if share else len(own)
        for number, item in enumerate(own):
            if number < first or (share and (number - first) % share):
                item.add_marker(pytest.mark.thorough)


def by_turns(names, sizes=(2, 3, 4, 8), take=2, label=lambda each: getattr(each, "name", each)):
    """Pairs of a name and a world size: ``take`` sizes of each name by turns, the others with the thorough tests."""
    pairs = []
    apart = len(sizes) // take
    for number, name in enumerate(names):
        taken = sizes[(number + TURN + TURN // 12) % apart :: apart]  # all in time, whatever share of the names runs
        for size in sizes:
            marks = () if size in taken else pytest.mark.thorough
            pairs.append(pytest.param(name, size, id=f"{label(name)}-{size}", marks=marks))
    return pairs


def pairwise(rows):
    """Few of the rows, others in each turn: any two columns' values that meet in a row of all meet in one of these.

    Args:
        rows: tuples of equally many values.

    Returns:
        A set of rows, by a greedy choice.
    """
    rows = Random(TURN).sample(rows, len(rows))
    met = {
        row: {(*places, *map(row.__getitem__, places)) for places in combinations(range(len(row)), 2)} for row in rows
    }
    left, cover = set().union(*met.values()), set()
    while left:
        best = max(rows, key=lambda row: len(met[row] & left))
        cover.add(best)
        left -= met[best]
    return cover
