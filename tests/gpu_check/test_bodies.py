"""The tests of tests/gpu with the CPU in the place of the GPU: it shows that they run, nothing of a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.test_adam import (
    test_each_of_a_hundred_steps_is_the_cpus,
    test_long_ranges_of_any_alignment,
    test_tensors_of_two_devices_are_refused,
)
from tests.gpu.test_attention import (
    BIASES,
    test_a_graph_sees_new_values,
    test_results_are_the_same_bits_again,
    test_rows_that_begin_anywhere,
)
from tests.gpu.test_attention import test_error_is_at_most_twice_that_of_torch as check_attention_errors
from tests.gpu.test_attention import test_masks_dropout_and_every_bias as check_attention_masks
from tests.gpu.test_compile import (
    test_blocks_captured_after_prepare,
    test_compiled_blocks_train_like_plain_ones,
)
from tests.gpu.test_compression import (
    test_blocks_of_integers,
    test_onebit,
    test_what_is_not_finite_spreads_over_its_block,
)
from tests.gpu.test_device_errors import (
    test_a_bad_layout_returns_zeros,
    test_a_captured_step_with_bad_settings_changes_nothing_until_they_are_good,
    test_a_negative_sum_reads_as_nan,
    test_negative_values_of_the_unsigned_code_read_as_nan,
)
from tests.gpu.test_eight_bit import test_adam_is_the_cpus, test_quantized_values_are_the_cpus
from tests.gpu.test_equivalence import (
    deterministic,
    test_delayed_updates_follow_the_cpus,
    test_narrow_moments_train_alike_in_every_tier,
    test_tied_weights,
    test_tiers_train_bit_for_bit_alike,
    test_tiers_train_bit_for_bit_alike_by_lion,
)
from tests.gpu.test_flat import (
    test_a_thousand_slices_in_one_call,
    test_slices,
    test_squared_norm_is_exact,
    test_sums_of_shards,
)
from tests.gpu.test_gpu_direct_storage import test_direct_storage_changes_no_bit
from tests.gpu.test_graphs import (
    test_a_chain_over_many_units_is_one_graph,
    test_a_factor_that_is_not_finite_skips_the_step,
    test_replays_equal_steps_made_one_by_one,
)
from tests.gpu.test_groups import test_trains_as_without_a_group, world
from tests.gpu.test_lamb_and_lion import test_norms_of_long_segments, test_steps_are_the_cpus
from tests.gpu.test_memory import OFFLOADS, test_a_second_hundred_steps_use_no_more
from tests.gpu.test_memory import test_device_bytes_equal_the_breakdown as check_device_bytes

__all__ = [
    "deterministic",
    "test_a_bad_layout_returns_zeros",
    "test_a_captured_step_with_bad_settings_changes_nothing_until_they_are_good",
    "test_a_chain_over_many_units_is_one_graph",
    "test_a_factor_that_is_not_finite_skips_the_step",
    "test_a_graph_sees_new_values",
    "test_a_negative_sum_reads_as_nan",
    "test_a_second_hundred_steps_use_no_more",
    "test_a_thousand_slices_in_one_call",
    "test_adam_is_the_cpus",
    "test_blocks_captured_after_prepare",
    "test_blocks_of_integers",
    "test_compiled_blocks_train_like_plain_ones",
    "test_delayed_updates_follow_the_cpus",
    "test_direct_storage_changes_no_bit",
    "test_each_of_a_hundred_steps_is_the_cpus",
    "test_long_ranges_of_any_alignment",
    "test_narrow_moments_train_alike_in_every_tier",
    "test_negative_values_of_the_unsigned_code_read_as_nan",
    "test_norms_of_long_segments",
    "test_onebit",
    "test_quantized_values_are_the_cpus",
    "test_replays_equal_steps_made_one_by_one",
    "test_results_are_the_same_bits_again",
    "test_rows_that_begin_anywhere",
    "test_slices",
    "test_squared_norm_is_exact",
    "test_steps_are_the_cpus",
    "test_sums_of_shards",
    "test_tensors_of_two_devices_are_refused",
    "test_tied_weights",
    "test_tiers_train_bit_for_bit_alike",
    "test_tiers_train_bit_for_bit_alike_by_lion",
    "test_trains_as_without_a_group",
    "test_what_is_not_finite_spreads_over_its_block",
    "world",
]


def test_device_bytes(device: torch.device, tmp_path: Path) -> None:
    check_device_bytes(device, tmp_path, 3, OFFLOADS[2])


def test_attention(device: torch.device, generator: torch.Generator) -> None:
    check_attention_masks(device, generator, torch.bfloat16, BIASES[2])
    check_attention_errors(device, generator, torch.float32, True)
