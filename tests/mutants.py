"""One-line breaks of the code, each with the test that must fail by it.

`python -m tests.mutants` (`make mutants`) breaks one line after another, in
copies of the source tree, and runs the named test: a test that passes with the
code broken proves nothing about the code. Prefer bugs whose effect is silent,
and tests that are fast.

A new law deserves a row here, and a row whose text is gone must be written
anew: `tests/mutants_test.py` holds the table to the code.
"""

import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Mutant(NamedTuple):
  """A bug that somebody could make.

  Attributes:
    file: The file, relative to the root of the repository.
    what: The bug in words.
    text: What is replaced; it is in the file exactly once.
    replacement: What stands there in its place.
    test: The id of a test that must fail, or of a test function of whose cases
      one must.
  """

  file: str
  what: str
  text: str
  replacement: str
  test: str


def problem(mutant: Mutant) -> str:
  """Says why a row does not apply; "" if it does."""
  path = ROOT / mutant.file
  if not path.is_file():
    return "there is no such file"
  count = path.read_text().count(mutant.text)
  if count != 1:
    return f"its text is {count} times in the file"
  return "" if mutant.text != mutant.replacement else "it changes nothing"


_DOORS = "tests/parallel/tensor/doors_test.py"
_VERBS = "tests/parallel/collectives_test.py"
_QUANTIZE = "tests/parallel/quantize_test.py"
_KERNELS = "tests/parallel/kernels"
_SHARDS = "tests/parallel/zero/shards_test.py"
_EQUATIONS = "tests/parallel/outer/equations_test.py"
_HEALTH = "tests/parallel/outer/health_test.py"
_SCHEDULES = "tests/parallel/schedules"
_PIPELINE = "tests/parallel/pipeline"
_NETWORK = "tests/parallel/network"
_TOPOLOGY = "tests/parallel/topology/topology_test.py"
_PARTITIONS = "tests/parallel/planner/partitions_test.py"
_XLA = "tests/parallel/xla"
_MODEL = "tests/caatnet/models/transformer_test.py"
_FAMILIES = "tests/caatnet/models/families_test.py"
_SCORING = "tests/caatnet/inference/scoring_test.py"
_ANSWERS = "tests/caatnet/interop/answers_test.py"
_SAMPLING = "tests/caatnet/inference/sampling_test.py"
_STOPS = "tests/caatnet/inference/stops_test.py"
_GENERATE = "tests/caatnet/inference/generate_test.py"
_TRAIN = "tests/caatnet/train"
_LINEAR = "tests/caatnet/train/linear_model_test.py"
_DATA = "tests/caatnet/data"
_KEPT = "tests/caatnet/train/tokenizer_test.py"
_BUILD = "tests/caatnet/build/sections_test.py"
_RANGES = "tests/caatnet/ranges_test.py"
_STUDIES = "tests/caatnet/studies"
_PUBLISHED = "tests/caatnet/interop/huggingface_test.py"
_WRONG = "tests/caatnet/interop/wrong_test.py"
_START = "tests/caatnet/train/start_test.py"
_DOCUMENTS = "tests/documents_test.py"
_INFERENCE = "parallel/network/inference"
_INFERENCE_TEST = f"{_NETWORK}/inference_test.py"

_COLLECTIVES = [
  Mutant(
    "parallel/axes.py", "devices go to the data axis first",
    "key=lambda n: n != _PREFERRED", "key=lambda n: n == _PREFERRED",
    "tests/parallel/axes_test.py::"
    "test_the_choice_uses_most_devices_and_favours_tensor",
  ),
  Mutant(
    "parallel/collectives.py", "a rank is numbered by devices, not by lanes",
    "lax.axis_index(axis.name) * axis.lanes + jnp.arange(axis.lanes)",
    "lax.axis_index(axis.name) + axis.devices * jnp.arange(axis.lanes)",
    f"{_VERBS}::test_a_rank_s_number_is_its_place",
  ),
  Mutant(
    "parallel/collectives.py", "only the first lane is reduced",
    "  total = jnp.sum(x, axis=0)\n  if axis.carrier",
    "  total = x[0]\n  if axis.carrier",
    f"{_VERBS}::test_verb_is_its_definition[all_reduce-4]",
  ),
  Mutant(
    "parallel/collectives.py", "what is scattered stands before a short dim",
    "slices = jnp.moveaxis(parts, dim, 0)",
    "parts = jnp.moveaxis(x, dim, 0)\n"
    "  parts = parts.reshape(n, -1, *parts.shape[1:])\n"
    "  slices = jnp.moveaxis(parts, 1, dim + 1)",
    "tests/parallel/collectives_test.py::"
    "test_a_reduce_scatter_puts_no_short_dim_last",
  ),
  Mutant(
    "parallel/collectives.py", "sending lanes and devices change places",
    "slices = jnp.moveaxis(slices, (0, 2), (concat_dim + 1, concat_dim + 2))",
    "slices = jnp.moveaxis(slices, (2, 0), (concat_dim + 1, concat_dim + 2))",
    f"{_VERBS}::test_verb_is_its_definition[all_to_all-4]",
  ),
  Mutant(
    "parallel/collectives.py", "a later permute forgets an earlier one's lane",
    "received[destination] = received[destination] + arrived",
    "received[destination] = arrived",
    f"{_VERBS}::test_permutes_that_end_in_one_lane_are_joined[4]",
  ),
  Mutant(
    "parallel/routes.py", "a ring adds the part of the wrong device",
    "part(here - step * hop)\n", "part(here - hop)\n",
    f"{_DOORS}::test_every_route_is_the_psum[ring-False-3]",
  ),
  Mutant(
    "parallel/routes.py", "both halves of a ring go the same way",
    "_ring(down, name, n, -1)", "_ring(down, name, n, 1)",
    f"{_DOORS}::test_both_directions_of_a_ring_are_in_use",
  ),
  Mutant(
    "parallel/routes.py", "summands of one shot add up in their own dtype",
    "wide = jnp.promote_types(wide, jnp.float32)",
    "wide = jnp.promote_types(wide, x.dtype)",
    f"{_VERBS}::test_one_shot_adds_in_order_and_rounds_once",
  ),
]

_TENSOR = [
  Mutant(
    "parallel/tensor/doors.py", "private channels miss their factor",
    "both[None, ..., k:] * factor", "both[None, ..., k:]",
    f"{_DOORS}::test_the_doors_are_the_rank_oracle[0.5-0.5-8-8-True]",
  ),
  Mutant(
    "parallel/tensor/doors.py", "a norm's statistics leave shared ones out",
    "squares = sum_of_squares(x.shared) + sum_of_squares(x.private)",
    "squares = sum_of_squares(x.private)",
    f"{_DOORS}::test_the_doors_are_the_rank_oracle[0.5-0.5-4-2-False]",
  ),
  Mutant(
    "parallel/tensor/doors.py", "the derivative of a norm's factor is wrong",
    "axis=-1, keepdims=True) / factor", "axis=-1, keepdims=True)",
    f"{_DOORS}::test_the_doors_are_the_rank_oracle[0.5-0.5-4-2-False]",
  ),
  Mutant(
    "parallel/tensor/stream.py", "channels that become private lie behind",
    "jnp.concatenate([moved, self.private], axis=-1)",
    "jnp.concatenate([self.private, moved], axis=-1)",
    f"{_DOORS}::test_the_doors_are_the_rank_oracle[0.29-0.8-8-4-True]",
  ),
  Mutant(
    "parallel/tensor/stream.py", "private channels drop the residual",
    "Stream(x.shared + y.shared, x.private + y.private)",
    "Stream(x.shared + y.shared, y.private)",
    f"{_DOORS}::test_the_doors_are_the_rank_oracle[0.5-0.5-8-4-False]",
  ),
  Mutant(
    "parallel/tensor/stream.py", "a late reduction forgets the factor",
    "return Update(shared, self.private * scale)",
    "return Update(shared, self.private)",
    f"{_DOORS}::test_kernels_of_routes_are_the_psum"
    "[ring_kernel-2-2-fractions3-float32-ring_partial_all_reduce]",
  ),
  Mutant(
    "parallel/tensor/stream.py", "the entry sums in the activations' dtype",
    "x = cast_to_ranks(x, axis.name, sync.backward_dtype)",
    "x = varying(x, axis.name)",
    f"{_DOORS}::test_each_way_reduces_in_its_own_dtype[float32-None-bfloat16]",
  ),
  Mutant(
    "parallel/tensor/reductions.py", "a door's backward reduces nothing",
    "lambda g: varying(_sum_in(g, name, sync.backward_dtype, sync.route), "
    "name),",
    "lambda g: g,",
    f"{_DOORS}::test_the_row_door_s_derivative_is_its_transpose",
  ),
  Mutant(
    "parallel/tensor/reductions.py", "the backward has the forward's dtype",
    "_sum_in(g, name, sync.backward_dtype, sync.route)",
    "_sum_in(g, name, sync.forward_dtype, sync.route)",
    f"{_DOORS}::test_each_way_reduces_in_its_own_dtype[float32-None-bfloat16]",
  ),
  Mutant(
    "parallel/tensor/reductions.py", "a fused door's backward has no factor",
    "d_private * scale, d_gain", "d_private, d_gain",
    f"{_DOORS}::test_kernels_of_routes_are_the_psum"
    "[ring_kernel-2-2-fractions3-float32-ring_partial_all_reduce]",
  ),
  Mutant(
    "parallel/tensor/partial_sync.py", "k is rounded to the nearest",
    "return int(self.p * width)", "return round(self.p * width)",
    f"{_DOORS}::test_the_number_of_shared_channels_rounds_down",
  ),
  Mutant(
    "parallel/tensor/partial_sync.py", "the factor counts devices, not ranks",
    "math.sqrt(axis.size)", "math.sqrt(axis.devices)",
    f"{_DOORS}::test_the_doors_are_the_rank_oracle[0.5-0.5-8-4-False]",
  ),
]

_QUANTIZED = [
  Mutant(
    "parallel/quantize.py", "a device's lanes get the first ranks' weights",
    "varying(weights, axis.name), ranks_here(axis)[0], axis.lanes",
    "varying(weights, axis.name), ranks_here(axis)[0] // axis.lanes, "
    "axis.lanes",
    f"{_QUANTIZE}::test_a_mean_without_codec_has_its_weights",
  ),
  Mutant(
    "parallel/quantize.py", "an uncoded difference forgets its residual",
    "delta = delta + residual\n", "delta = delta + 0 * residual\n",
    f"{_QUANTIZE}::test_an_uncoded_difference_has_its_residual",
  ),
  Mutant(
    "parallel/quantize.py", "all ranks round with the same draws",
    "jax.vmap(lambda rank: jax.random.fold_in(key, rank))",
    "jax.vmap(lambda rank: jax.random.fold_in(key, 0 * rank))",
    f"{_QUANTIZE}::test_ranks_round_independently[int8]",
  ),
  Mutant(
    "parallel/quantize.py", "a reduce-scatter leaves the mean",
    "return api.total(\n    _deliver(encoded, axis), slices.shape[-1], codec,",
    "return api.mean(\n    _deliver(encoded, axis), slices.shape[-1], codec,",
    f"{_QUANTIZE}::test_the_reduce_scatter_is_the_sum_of_what_was_seen[4-2]",
  ),
  Mutant(
    "parallel/quantize.py", "the bytes of the mean itself are not counted",
    "elements = (axis.size + 1) * s", "elements = axis.size * s",
    f"{_QUANTIZE}::test_another_axis_keeps_its_own_values_and_its_split"
    "[all_to_all]",
  ),
  Mutant(
    "parallel/quantize.py", "a block crosses what it must not",
    "last = (-1, rest[-1]) if whole else (math.prod(rest),)",
    "last = (-1, rest[-1]) if rest else (math.prod(rest),)",
    f"{_QUANTIZE}::test_another_axis_keeps_its_own_values_and_its_split"
    "[all_gather]",
  ),
  Mutant(
    "parallel/wire.py", "the fused step takes rate for decay",
    "learning_rate=self.learning_rate, decay=self.decay, weights=weights,",
    "learning_rate=self.decay, decay=self.learning_rate, weights=weights,",
    f"{_QUANTIZE}::test_an_outer_step_is_optax_with_the_mean",
  ),
  Mutant(
    "parallel/wire.py", "the fused step forgets the weights",
    "codec,\n      learning_rate=self.learning_rate, decay=self.decay, "
    "weights=weights,",
    "codec,\n      learning_rate=self.learning_rate, decay=self.decay, "
    "weights=None,",
    f"{_EQUATIONS}::test_diloco_is_its_equation",
  ),
]

_CODECS = [
  Mutant(
    "parallel/kernels/codec/reference.py", "rounds towards zero",
    "whole = jnp.abs(numbers) + np.float32(2**23)",
    "whole = jnp.floor(jnp.abs(numbers)) + np.float32(2**23)",
    f"{_KERNELS}/codec_test.py::test_rounds_to_the_nearest_number",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "a scale is rounded down",
    "(bits + 251) & ~255", "bits & ~255",
    f"{_KERNELS}/codec_test.py::test_the_scale_covers_the_largest_element",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "a coin that is always tails",
    "steps = low + jnp.where(draws < steps - low, 1.0, 0.0)",
    "steps = low + jnp.where(draws < 0.0, 1.0, 0.0)",
    f"{_KERNELS}/codec_test.py::test_stochastic_rounding_is_unbiased[int4]",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "NaN of weight zero counts",
    "return jnp.where(weight == 0, 0.0, weight * x)", "return weight * x",
    f"{_QUANTIZE}::test_a_diverged_worker_is_seen_unless_it_has_no_weight[nan]",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "the outer step is not Nesterov's",
    "return params - learning_rate * (delta + decay * momentum), momentum",
    "return params - learning_rate * momentum, momentum",
    f"{_EQUATIONS}::test_diloco_is_its_equation",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "what rounding took has its sign",
    "return encoded, delta - decode(encoded, delta.shape[-1], codec)",
    "return encoded, decode(encoded, delta.shape[-1], codec) - delta",
    f"{_EQUATIONS}::test_what_is_not_heard_is_heard_later[int4]",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "the nearest power is too low",
    "((magnitude + 0x400000) >> 23)", "(magnitude >> 23)",
    f"{_KERNELS}/codec_test.py::test_the_codes_of_e3m0",
  ),
  Mutant(
    "parallel/kernels/codec/threefry.py", "a round rotates by another number",
    "(17, 29, 16, 24))", "(17, 29, 24, 16))",
    f"{_KERNELS}/codec_kernels_test.py::test_draws_are_those_of_jax",
  ),
  Mutant(
    "parallel/kernels/codec/top_k.py", "large and small magnitudes change",
    "scales = jnp.flip(jnp.mean(halves, axis=-1), axis=-1)",
    "scales = jnp.mean(halves, axis=-1)",
    f"{_KERNELS}/codec_test.py::test_top_k_keeps_the_largest_of_each_chunk",
  ),
  Mutant(
    "parallel/kernels/codec/top_k.py", "signs lie in the other's bits",
    "(packed >> shift) & 3 for shift in (0, 2, 4, 6)",
    "(packed >> shift) & 3 for shift in (0, 2, 6, 4)",
    f"{_EQUATIONS}::test_sparseloco_is_its_equation",
  ),
  Mutant(
    "parallel/kernels/codec/tpu.py", "blocks of a row draw the same numbers",
    "number = (row * pl.num_programs(1) + pl.program_id(1)) * block",
    "number = (row * pl.num_programs(1)) * block",
    f"{_KERNELS}/codec_kernels_test.py::test_kernels_send_the_reference_s_bits"
    "[int8, stochastic, 300 rows-tpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/codec/tpu.py", "the mean of a 4-bit block is shifted",
    "channels = pl.ds(i * num_bytes, num_bytes)",
    "channels = pl.ds((1 - i) * num_bytes % (2 * num_bytes), num_bytes)",
    f"{_KERNELS}/codec_kernels_test.py::test_kernels_send_the_reference_s_bits"
    "[int4, odd-tpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/codec/gpu.py", "senders of the remainder count twice",
    "lambda turn, totals: several(rest + turn * _UNROLLED, _UNROLLED, totals),",
    "lambda turn, totals: several(turn * _UNROLLED, _UNROLLED, totals),",
    f"{_KERNELS}/codec_kernels_test.py::test_kernels_send_the_reference_s_bits"
    "[int8, block 128-gpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/codec/gpu.py", "the scale is that of half a block",
    "scale = scale_of(largest_of(*parts), codec)",
    "scale = scale_of(largest_of(parts[0]), codec)",
    f"{_KERNELS}/codec_kernels_test.py::test_kernels_send_the_reference_s_bits"
    "[int4, odd-gpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/codec/api.py", "a sum over senders is divided",
    "lambda: reference.total(encoded, n, codec), divide=False,",
    "lambda: reference.total(encoded, n, codec),",
    f"{_KERNELS}/codec_kernels_test.py::test_kernels_send_the_reference_s_bits"
    "[int4, odd-tpu_interpret]",
  ),
]

_OTHER_KERNELS = [
  Mutant(
    "parallel/kernels/add_norm/reference.py", "the mean is over shared ones",
    "rstd = lax.rsqrt(squares / both.shape[-1] + eps)",
    "rstd = lax.rsqrt(squares / shared.shape[-1] + eps)",
    f"{_KERNELS}/add_norm_test.py::test_the_reference_is_the_textbook",
  ),
  Mutant(
    "parallel/kernels/add_norm/tpu.py", "a norm's derivative lacks its mean",
    "common = dot * (rstd * rstd * rstd) / width",
    "common = dot * (rstd * rstd * rstd)",
    f"{_KERNELS}/add_norm_test.py::test_kernels_are_the_reference"
    "[odd-tpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/add_norm/tpu.py", "rows past the end add to the gain",
    "inside = row < num_rows - pl.program_id(0) * block",
    "inside = row < block",
    f"{_KERNELS}/add_norm_test.py::test_kernels_are_the_reference"
    "[many wide rows-tpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/add_norm/gpu.py", "a program skips its last row",
    "turns = (num_rows - first + programs - 1) // programs",
    "turns = (num_rows - first) // programs",
    f"{_KERNELS}/add_norm_test.py::test_kernels_are_the_reference"
    "[odd-gpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/add_norm/api.py", "the factor also scales a shared row",
    "if d_private.shape[-1]:\n", "if True:\n",
    f"{_KERNELS}/add_norm_test.py::"
    "test_the_factor_is_of_private_channels_only[tpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/reduce_add_norm/tpu.py", "the sum is not rounded before",
    "update = total.astype(dtype).astype(jnp.float32)",
    "update = total",
    f"{_KERNELS}/reduce_add_norm_test.py::"
    "test_the_sum_over_ranks_is_rounded_before_it_is_added",
  ),
  Mutant(
    "parallel/kernels/reduce_add_norm/gpu.py", "the last rank is left out",
    "for rank in range(partial_ref.shape[0]):",
    "for rank in range(partial_ref.shape[0] - 1):",
    f"{_KERNELS}/reduce_add_norm_test.py::test_kernels_are_the_reference"
    "[odd-gpu_interpret]",
  ),
  Mutant(
    "parallel/kernels/reduce_add_norm/api.py", "the private cotangent is lost",
    "d_private = d_private if len(new) > 1 else None",
    "d_private = d_parts[-1] if len(new) > 1 else None",
    f"{_KERNELS}/reduce_add_norm_test.py::test_kernels_are_the_reference",
  ),
  Mutant(
    "parallel/kernels/reduce_add_norm/reference.py", "scales of another rank",
    "scale = lax.stop_gradient(scales[rank])",
    "scale = lax.stop_gradient(scales[0])",
    f"{_KERNELS}/reduce_add_norm_test.py::test_kernels_are_the_reference",
  ),
  Mutant(
    "parallel/kernels/ring_all_reduce/tpu.py", "a hop adds the next chunk",
    "return way * n + lax.rem(here + step * (hop + 1) + 2 * n, n)",
    "return way * n + lax.rem(here + step * hop + 2 * n, n)",
    f"{_KERNELS}/ring_all_reduce_test.py::"
    "test_the_kernel_is_the_reference_without_races",
  ),
  Mutant(
    "parallel/kernels/ring_all_reduce/api.py", "cotangents are not summed",
    "d_partial = _psum(options.axis_name, d_shared)", "d_partial = d_shared",
    f"{_KERNELS}/ring_all_reduce_test.py::"
    "test_its_gradient_is_that_of_the_psum",
  ),
  Mutant(
    "parallel/kernels/schedule_all_reduce/tpu.py", "a grant goes out too soon",
    "later = heard[turns[index + 2], device]",
    "later = heard[turns[index + 1], device]",
    f"{_KERNELS}/schedule_all_reduce_test.py::test_grants_go_to_who_sends_next",
  ),
  Mutant(
    "parallel/kernels/schedule_all_reduce/reference.py", "sends what arrived",
    "arrived = x[sender, table[turn, sender, SENT]]",
    "arrived = new[sender, table[turn, sender, SENT]]",
    f"{_KERNELS}/schedule_all_reduce_test.py::"
    "test_the_schedules_are_all_reduces",
  ),
  Mutant(
    "parallel/kernels/selection.py", "the first preference always runs",
    'reason = None if name == "reference" else refusal(choice.kind)',
    "reason = None",
    f"{_KERNELS}/add_norm_test.py::test_a_refusal_says_why",
  ),
  Mutant(
    "parallel/kernels/calls.py", "a kernel that sends is mapped over a grid",
    "if interpret or sends is not None:", "if interpret:",
    f"{_KERNELS}/schedule_all_reduce_test.py::"
    "test_lanes_call_the_kernel_one_after_another",
  ),
  Mutant(
    "parallel/kernels/calls.py", "an interpreted kernel is mapped over a grid",
    "if interpret or sends is not None:", "if sends is not None:",
    f"{_KERNELS}/add_norm_test.py::test_a_kernel_is_mapped_over_lanes",
  ),
  Mutant(
    "parallel/kernels/calls.py", "a kernel has one barrier for all axes",
    "return axes.index(axis_name) * len(BARRIERS)", "return len(BARRIERS)",
    f"{_KERNELS}/schedule_all_reduce_test.py::"
    "test_kernels_have_a_barrier_for_each_axis",
  ),
  Mutant(
    "parallel/kernels/calls.py", "few rows are cut within a tile",
    "max(16, 1 << (fitting.bit_length() - 1))",
    "1 << (fitting.bit_length() - 1)",
    f"{_KERNELS}/calls_test.py::test_blocks_are_whole_tiles_or_all_rows",
  ),
]

_ZERO = [
  Mutant(
    "parallel/zero/partition.py", "what divides is padded all the same",
    "return math.ceil(num_elements / self.degree(self.optimizer))",
    "return num_elements // self.degree(self.optimizer) + 1",
    f"{_SHARDS}::test_a_node_count_that_is_no_power_of_two",
  ),
  Mutant(
    "parallel/zero/partition.py", "depths are counted from outside",
    "return self.levels[::-1]", "return self.levels",
    f"{_PARTITIONS}::test_memory_of_20b_and_the_largest_model",
  ),
  Mutant(
    "parallel/zero/partition.py", "ZeRO-2 keeps gradients whole",
    '"zero2": ("none", "all", "all", {}),',
    '"zero2": ("none", "none", "all", {}),',
    f"{_PARTITIONS}::test_bytes_into_a_node[2]",
  ),
  Mutant(
    "parallel/zero/partition.py", "weights may lie wider than the optimizer",
    "depths[0] <= depths[1] <= depths[2] <= len(self.levels)",
    "depths[0] <= depths[1] and depths[2] <= len(self.levels)",
    f"{_PARTITIONS}::test_the_space_is_every_valid_partition",
  ),
  Mutant(
    "parallel/zero/cost.py", "only one moment is stored",
    "stored += 12 * p.count", "stored += 8 * p.count",
    f"{_PARTITIONS}::test_memory_of_20b_and_the_largest_model",
  ),
  Mutant(
    "parallel/zero/cost.py", "a step gathers once for all microbatches",
    "partition, p, lanes, w, 0, stored, accumulation * p.uses, \"forward\", o",
    "partition, p, lanes, w, 0, stored, p.uses, \"forward\", o",
    f"{_PARTITIONS}::test_bytes_into_a_node[3]",
  ),
  Mutant(
    "parallel/zero/cost.py", "an all-reduce is counted one way",
    "2 * size * (ranks - 1) / ranks,", "size * (ranks - 1) / ranks,",
    f"{_PARTITIONS}::test_bytes_into_a_node[1]",
  ),
  Mutant(
    "parallel/zero/cost.py", "lanes are summed before a coded all-to-all",
    "size * all_lanes if apart else 0,",
    "size * all_lanes // here if apart else 0,",
    f"{_SHARDS}::test_what_a_partition_sends_is_what_its_cost_says",
  ),
  Mutant(
    "parallel/zero/cost.py", "lanes inside gather once",
    "sent = rank * here * inside if here < level.size else 0",
    "sent = rank * here if here < level.size else 0",
    f"{_SHARDS}::test_what_a_partition_sends_is_what_its_cost_says",
  ),
  Mutant(
    "parallel/zero/shards.py", "levels are gathered from the inside",
    "for axis in self.inner[lower:upper][::-1]:",
    "for axis in self.inner[lower:upper]:",
    f"{_SHARDS}::test_a_second_copy_on_lanes_and_devices_is_the_whole[3]",
  ),
  Mutant(
    "parallel/zero/shards.py", "a second copy is of the first lanes",
    "first = lax.axis_index(axis.name) * axis.lanes\n",
    "first = lax.axis_index(axis.name)\n",
    f"{_SHARDS}::test_a_second_copy_on_lanes_and_devices_is_the_whole",
  ),
  Mutant(
    "parallel/zero/shards.py", "replicas of the optimizer take the mean",
    "return lax.psum(jnp.sum(x, axis=beyond), names)",
    "return lax.pmean(jnp.sum(x, axis=beyond), names)",
    f"{_SHARDS}::test_all_triples_give_the_same_gradients[False]",
  ),
  Mutant(
    "parallel/zero/shards.py", "gradients are summed in their own dtype",
    "x = x.astype(jnp.float32).reshape(*lanes, *lead, tensor.size)",
    "x = x.reshape(*lanes, *lead, tensor.size)",
    f"{_SHARDS}::test_gradients_are_summed_in_float32",
  ),
  Mutant(
    "parallel/zero/gathered.py", "the first layer keeps the last's gradient",
    "return None, _put(dsinks, new, 0), dx", "return None, dsinks, dx",
    f"{_SHARDS}::test_all_triples_give_the_same_gradients[True]",
  ),
  Mutant(
    "parallel/zero/gathered.py", "prefetch gathers the layer that runs",
    "self._gather(tensors, _at(weights, i + 1), x)",
    "self._gather(tensors, _at(weights, i), x)",
    f"{_SHARDS}::test_all_triples_give_the_same_gradients[True]",
  ),
  Mutant(
    "parallel/zero/gathered.py", "parameters stay until the backward",
    "vjp.args_res[0] = None\n", "pass\n",
    f"{_SHARDS}::test_the_backward_gathers_each_layer_again",
  ),
  Mutant(
    "parallel/zero/gathered.py", "forms of parameters stay, too",
    "return primitive.name not in _FORMS", "return True",
    f"{_SHARDS}::test_the_backward_gathers_each_layer_again",
  ),
  Mutant(
    "parallel/zero/gathered.py", "the second gather may be the first",
    "source, _ = lax.optimization_barrier((source, dy))", "pass",
    f"{_SHARDS}::test_the_backward_gathers_each_layer_again",
  ),
  Mutant(
    "parallel/zero/gathered.py", "a layer is gathered for a VJP without it",
    "reads = vjp.args_res[0] is None", "reads = True",
    f"{_SHARDS}::test_a_backward_that_reads_no_parameters_gathers_none[True]",
  ),
  Mutant(
    "parallel/zero/shards.py", "lanes and devices of a hop change places",
    "for part in (0, 1) for i in front", "for part in (1, 0) for i in front",
    f"{_SHARDS}::test_a_hop_over_several_levels_is_the_sum[two]",
  ),
  Mutant(
    "parallel/zero/shards.py", "the levels of a hop change places",
    "for part in (0, 1) for i in front[::-1]]",
    "for part in (0, 1) for i in front]",
    f"{_SHARDS}::test_a_hop_over_several_levels_is_the_sum[two]",
  ),
  Mutant(
    "parallel/zero/partition.py", "small tensors are coded",
    "return shard >= self.coded_blocks * self.block", "return True",
    f"{_SHARDS}::test_small_tensors_are_not_coded",
  ),
  Mutant(
    "parallel/zero/cost.py", "a hop is priced as one of its levels",
    "names, ranks, \"all_to_all\", when, dtype,\n        size * all_lanes",
    "names, ranks, \"all_to_all\", when, dtype,\n        size * here",
    f"{_SHARDS}::test_what_a_partition_sends_is_what_its_cost_says",
  ),
  Mutant(
    "parallel/zero/cost.py", "lanes share a gradient",
    "gradients += p.gradient_bytes * p.count * all_lanes * elements",
    "gradients += p.gradient_bytes * p.count * elements",
    f"{_SHARDS}::"
    "test_gradients_of_all_lanes_are_counted_where_nothing_is_sharded",
  ),
  Mutant(
    "parallel/planner/partitions.py", "a hop over levels crosses the outer one",
    "for name in e.levels[::-1]:", "for name in e.levels[:1]:",
    f"{_PARTITIONS}::"
    "test_two_hops_send_more_between_the_devices_of_a_node",
  ),
  Mutant(
    "parallel/axes.py", "ties go to the outermost axis",
    "sorted(reversed(names), key", "sorted(names, key",
    "tests/parallel/axes_test.py::"
    "test_ties_go_to_the_innermost_axis_where_there_is_no_tensor_axis",
  ),
  Mutant(
    "parallel/kernels/codec/reference.py", "a NaN of all ones becomes -0",
    "return jnp.where(x == x, lax.bitcast_convert_type(bits, jnp.float32), x)",
    "return lax.bitcast_convert_type(bits, jnp.float32)",
    f"{_KERNELS}/codec_test.py::test_rounding_to_23_bits_keeps_nan",
  ),
  Mutant(
    "parallel/outer/base.py", "worker 0's -0 becomes 0",
    "found = all_reduce(only_first(ranks, bits), worker)",
    "found = lax.bitcast_convert_type(all_reduce(only_first(ranks, x), worker)"
    ", bits.dtype)",
    f"{_EQUATIONS}::test_worker_0_s_values_come_with_their_sign",
  ),
  Mutant(
    "parallel/outer/noloco.py", "what stays on a device counts as sent",
    "any(source != there for source, there in moves or ()) for moves in routes",
    "moves is not None for moves in routes",
    f"{_EQUATIONS}::test_noloco_sends_what_its_formula_says",
  ),
  Mutant(
    "caatnet/train/step.py", "gradients are not corrected",
    "grads = outer.gradients(grads, carried)", "pass",
    f"{_LINEAR}::test_a_step_begins_corrects_and_finishes_the_outer_loop",
  ),
]

_OUTER = [
  Mutant(
    "parallel/outer/base.py", "a mean over workers is over devices",
    "all_reduce(x, worker) / worker.size",
    "all_reduce(x, worker) / worker.lanes",
    f"{_EQUATIONS}::test_data_parallel_steps_by_the_mean_gradient",
  ),
  Mutant(
    "parallel/outer/data_parallel.py", "workers keep their own gradients",
    "return to_workers(mean_over_workers(grads, self.worker), self.worker)",
    "return grads",
    f"{_EQUATIONS}::test_data_parallel_steps_by_the_mean_gradient",
  ),
  Mutant(
    "parallel/outer/diloco.py", "a round ends a step early",
    "ends = (step + 1) % self.every == 0", "ends = step % self.every == 0",
    f"{_EQUATIONS}::test_diloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/diloco.py", "the same clients are heard in all rounds",
    "jax.random.fold_in(jax.random.key(self.exchange.seed), number)",
    "jax.random.fold_in(jax.random.key(self.exchange.seed), 0 * number)",
    f"{_EQUATIONS}::test_a_sample_of_clients_is_averaged_with_its_weights",
  ),
  Mutant(
    "parallel/outer/diloco.py", "one client more is heard",
    "(place < self.clients)", "(place <= self.clients)",
    f"{_EQUATIONS}::test_a_sample_of_clients_is_averaged_with_its_weights",
  ),
  Mutant(
    "parallel/outer/diloco.py", "workers do not restart from the mean",
    "return to_workers(new, self.worker), state", "return params, state",
    f"{_EQUATIONS}::test_diloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/optimizers.py", "the momentum of the last round stays",
    "return params, optax.tree_utils.tree_set(state, trace=momentum), rest",
    "return params, state, rest",
    f"{_EQUATIONS}::test_diloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/health.py", "who is heard overrides the weights",
    "return found if heard is None else found * heard",
    "return found if heard is None else heard",
    f"{_EQUATIONS}::test_a_sample_of_clients_is_averaged_with_its_weights",
  ),
  Mutant(
    "parallel/outer/health.py", "the upper of two norms is the median",
    "jnp.sum(finite, axis=0, keepdims=True) - 1, 0) // 2",
    "jnp.sum(finite, axis=0, keepdims=True), 0) // 2",
    f"{_HEALTH}::test_a_norm_is_judged_by_the_lower_median",
  ),
  Mutant(
    "parallel/outer/health.py", "nobody is far out",
    "return finite & ((norms", "return finite | ((norms",
    f"{_HEALTH}::test_a_norm_is_judged_by_the_lower_median",
  ),
  Mutant(
    "parallel/outer/health.py", "a norm is its square",
    "  return jnp.sqrt(sum(", "  return (sum(",
    f"{_HEALTH}::test_a_norm_is_that_of_all_of_a_worker_s_parameters",
  ),
  Mutant(
    "parallel/outer/health.py", "a device sends the norm of one worker",
    '{"float32": 4 * worker.lanes}', '{"float32": 4}',
    f"{_HEALTH}::test_a_verdict_sends_what_its_formula_says",
  ),
  Mutant(
    "parallel/outer/noloco.py", "nobody of a pair is far out",
    "health.healthy(both, self.rule.outlier_factor)",
    "health.healthy(both, 0.0)",
    f"{_HEALTH}::test_of_a_pair_the_healthy_one_is_heard",
  ),
  Mutant(
    "parallel/outer/exchange.py", "who is left out loses its residual to NaN",
    "heard[ranks_here(self.worker)] > 0, residual,",
    "heard[ranks_here(self.worker)] >= 0, residual,",
    f"{_HEALTH}::test_the_others_are_as_if_it_had_not_been_there"
    "[diloco int4-3]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "who is left out keeps its other fragments",
    "params = health.choose(mine, params, outer)", "pass",
    f"{_HEALTH}::test_the_others_are_as_if_it_had_not_been_there[streaming-3]",
  ),
  Mutant(
    "parallel/outer/eager.py", "who is left out has a share all the same",
    'state["workers"]["delta"], state, plan.numbers[0], state["heard"]',
    'state["workers"]["delta"], state, plan.numbers[0]',
    f"{_HEALTH}::test_the_others_are_as_if_it_had_not_been_there[eager-3]",
  ),
  Mutant(
    "parallel/outer/noloco.py", "one of a pair hears its own difference alone",
    "delta, jnp.where(other, other_delta, 0.0))", "delta, 0.0)",
    f"{_HEALTH}::test_of_a_pair_the_healthy_one_is_heard",
  ),
  Mutant(
    "parallel/collectives.py", "a NaN that is waited for changes what waits",
    "(head * (head + 1)) & 1", "(head >> 22) & 1",
    f"{_HEALTH}::test_waiting_for_nan_changes_nothing",
  ),
  Mutant(
    "caatnet/train/state.py", "a new optimizer starts its schedule anew",
    "lambda old, new: old if is_schedule(old) else new,",
    "lambda old, new: new,",
    f"{_LINEAR}::test_a_worker_that_diverges_is_left_out_and_named",
  ),
  Mutant(
    "caatnet/train/state.py", "diverged moments stay with the worker",
    'choose(told["just_left_out"] > 0,', 'choose(told["just_left_out"] > 1,',
    f"{_LINEAR}::test_a_worker_that_diverges_is_left_out_and_named",
  ),
  Mutant(
    "caatnet/train/norms.py", "a worker is judged by one tensor rank's part",
    "total + (lax.psum(square, names) if names else square)",
    "total + (lax.pmean(square, names) if names else square)",
    f"{_TRAIN}/outer_loops_test.py::"
    "test_the_compensation_has_the_size_that_it_is_told",
  ),
  Mutant(
    "caatnet/train/membership.py", "who joins starts the schedule anew",
    "new = with_schedule_of(jax.tree.map(lambda x: x[0], opt_state), new)",
    "pass",
    f"{_LINEAR}::test_workers_join_and_leave_between_rounds",
  ),
  Mutant(
    "parallel/outer/base.py", "who joins is the first that was there",
    "lambda x, y: x.at[first:].set(y), tree, new",
    "lambda x, y: x.at[first:].set(x[0]), tree, new",
    f"{_LINEAR}::test_workers_join_and_leave_between_rounds",
  ),
  Mutant(
    "parallel/outer/eager.py", "who joins an eager run has sent nothing",
    '"params", "optimizer", "delta", "share"\n',
    '"params", "optimizer", "share"\n',
    f"{_HEALTH}::test_who_joins_starts_from_the_outer_parameters[eager]",
  ),
  Mutant(
    "parallel/outer/base.py", "workers may join in the middle of a round",
    "return step % self.every == 0\n", "return True\n",
    f"{_LINEAR}::test_workers_join_and_leave_between_rounds",
  ),
  Mutant(
    "caatnet/train/workers.py", "a diverged worker counts in the mean",
    "counted = self.finite\n", "counted = self.finite | True\n",
    f"{_LINEAR}::test_a_worker_that_diverges_is_left_out_and_named",
  ),
  Mutant(
    "caatnet/train/workers.py", "who has recovered diverges unseen",
    "known.intersection_update(bad)", "pass",
    f"{_TRAIN}/workers_test.py::"
    "test_a_worker_that_diverges_again_is_named_again",
  ),
  Mutant(
    "caatnet/train/workers.py", "who is left out is one of the others",
    "np.sort(np.delete(norms, worker))", "np.sort(norms)",
    f"{_TRAIN}/workers_test.py::"
    "test_who_is_left_out_is_compared_with_the_others",
  ),
  Mutant(
    "parallel/outer/exchange.py", "the rest of each rounding is forgotten",
    '{"workers": state["workers"] | {"residual": residual}}',
    '{"workers": {"residual": residual} | state["workers"]}',
    f"{_EQUATIONS}::test_what_is_not_heard_is_heard_later[int4]",
  ),
  Mutant(
    "parallel/outer/dc_s3gd.py", "the compensation points the other way",
    "lambda g, m, u: g * g * (m - u),", "lambda g, m, u: g * g * (u - m),",
    f"{_EQUATIONS}::test_dc_s3gd_is_its_equation",
  ),
  Mutant(
    "parallel/outer/dc_s3gd.py", "the compensation ignores the gradient",
    "lambda g, m, u: g * g * (m - u),", "lambda g, m, u: m - u,",
    f"{_EQUATIONS}::test_dc_s3gd_is_its_equation",
  ),
  Mutant(
    "parallel/outer/dc_s3gd.py", "workers go on from their own parameters",
    "params = optax.apply_updates(to_workers(common, self.worker), updates)",
    "params = optax.apply_updates(params, updates)",
    f"{_EQUATIONS}::test_dc_s3gd_is_its_equation",
  ),
  Mutant(
    "parallel/outer/sparseloco.py", "nothing decays",
    "lambda e, d: self.decay * e + d,", "lambda e, d: e + d,",
    f"{_EQUATIONS}::test_sparseloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/sparseloco.py", "the outer rate is one",
    "lambda phi, mean: phi - self.rate * mean, outer,",
    "lambda phi, mean: phi - mean, outer,",
    f"{_EQUATIONS}::test_sparseloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/sparseloco.py", "the residual loses what all have heard",
    "left.append(leaf - own)", "left.append(leaf - mean)",
    f"{_EQUATIONS}::test_sparseloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/noloco.py", "momentum brakes",
    "self.momentum * momentum\n", "-self.momentum * momentum\n",
    f"{_EQUATIONS}::test_noloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/noloco.py", "rate and pull change places",
    "- self.pull * (phi - other_phi) / 2",
    "- self.rate * (phi - other_phi) / 2",
    f"{_EQUATIONS}::test_noloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/noloco.py", "a pair pushes itself apart",
    "- self.pull * (phi - other_phi) / 2",
    "+ self.pull * (phi - other_phi) / 2",
    f"{_EQUATIONS}::test_noloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/noloco.py", "the partner's outer gradient counts alone",
    "return (first + jnp.where(other, other_delta, first)) / 2",
    "return jnp.where(other, other_delta, first)",
    f"{_EQUATIONS}::test_noloco_is_its_equation",
  ),
  Mutant(
    "parallel/outer/noloco.py", "an odd number of workers has a round less",
    "return max(1, workers - 1 + workers % 2)", "return max(1, workers - 1)",
    f"{_TRAIN}/outer_loops_test.py::"
    "test_a_tournament_pairs_everyone_with_everyone_once",
  ),
  Mutant(
    "parallel/outer/noloco.py", "all seeds pair workers alike",
    'random.Random(f"{self.seed} {number}")', 'random.Random(f"{number}")',
    f"{_EQUATIONS}::test_the_seed_decides_who_meets_in_noloco",
  ),
  Mutant(
    "parallel/outer/eager.py", "one's own old part stays in the mean",
    "return now * share + (all_last - last * last_share)",
    "return now * share + all_last",
    f"{_EQUATIONS}::test_eager_is_its_equation",
  ),
  Mutant(
    "parallel/outer/eager.py", "the outer optimizer's state is dropped",
    'own = own | {"params": outer, "optimizer": optimizer, "delta": delta}',
    'own = own | {"params": outer, "delta": delta}',
    f"{_EQUATIONS}::test_eager_is_its_equation",
  ),
  Mutant(
    "parallel/outer/eager.py", "what is sent is sent a step late",
    "begins = step > 0 and step % self.every == 0",
    "begins = step > 0 and step % self.every == 1",
    f"{_EQUATIONS}::test_eager_sends_at_the_head_of_a_round",
  ),
  Mutant(
    "parallel/outer/eager.py", "all rounds round by the same draws",
    "return Plan((begins, ends), (step // self.every,))",
    "return Plan((begins, ends), (0,))",
    f"{_EQUATIONS}::test_no_two_rounds_round_by_the_same_draws",
  ),
  Mutant(
    "parallel/outer/eager.py", "one's own part weighs as all others do",
    "self.exchange.weights, verdict.heard, self.worker",
    "(), verdict.heard, self.worker",
    f"{_EQUATIONS}::test_eager_weighs_one_s_own_part_as_the_mean_does",
  ),
  Mutant(
    "parallel/outer/streaming.py", "a fragment's momentum is never stored",
    'return state | {"params": params, "optimizer": optimizer}',
    'return state | {"params": params, "optimizer": whole}',
    f"{_EQUATIONS}::test_streaming_is_its_equation[late, strided layers]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "workers keep the outer share",
    "return self.keep * mine + (1.0 - self.keep) * outer",
    "return (1.0 - self.keep) * mine + self.keep * outer",
    f"{_EQUATIONS}::test_streaming_is_its_equation[late, strided layers]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "all workers merge with the first",
    "now = jnp.asarray(taus)[ranks_here(self.worker)] == numbers.tau",
    "now = jnp.asarray(taus)[ranks_here(self.worker)] >= numbers.tau",
    f"{_EQUATIONS}::test_streaming_is_its_equation[late, strided layers]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "later pieces are of later parameters",
    "if send.starts:  # keep", "if True:  # keep",
    f"{_EQUATIONS}::test_streaming_is_its_equation[in pieces]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "all pieces round by the same draws",
    "draw = numbers.exchange * self.pieces + piece",
    "draw = numbers.exchange * self.pieces",
    f"{_EQUATIONS}::test_no_two_pieces_round_by_the_same_draws",
  ),
  Mutant(
    "parallel/outer/pieces.py", "the first piece arrives twice",
    "rows = lax.dynamic_update_slice_in_dim(rows, y, number * size, -1)",
    "rows = lax.dynamic_update_slice_in_dim(rows, y, 0 * size, -1)",
    f"{_EQUATIONS}::test_streaming_is_its_equation[in pieces]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "the residual of all layers is the first's",
    'residual = cut.put(workers["residual"], part, kind, place, 1)',
    'residual = cut.put(workers["residual"], part, kind, 0 * place, 1)',
    f"{_EQUATIONS}::test_a_fragment_s_residual_is_its_own[1]",
  ),
  Mutant(
    "parallel/outer/fragment_plan.py", "fragments are sent in the first round",
    "return self.in_round(step) if step >= self.every else None",
    "return self.in_round(step) if step > 0 else None",
    f"{_EQUATIONS}::test_streaming_is_its_equation[late, strided layers]",
  ),
  Mutant(
    "parallel/outer/fragment_plan.py", "a fragment's turn is a step late",
    "divmod(step % self.every, self.spacing)",
    "divmod((step - 1) % self.every, self.spacing)",
    f"{_EQUATIONS}::test_streaming_is_its_equation"
    "[at once, consecutive layers]",
  ),
  Mutant(
    "parallel/outer/fragments.py", "strided fragments are consecutive",
    "cut = cut[::-1] if self.strided else cut",
    "cut = cut if self.strided else cut[::-1]",
    f"{_EQUATIONS}::test_streaming_is_its_equation[late, strided layers]",
  ),
]

_SCHEDULES_ROWS = [
  Mutant(
    "parallel/schedules/ring.py", "the ring goes in the order of numbers",
    "return order if grid is None else grid", "return order",
    f"{_SCHEDULES}/builders_test.py::test_a_ring_on_a_grid_takes_single_links",
  ),
  Mutant(
    "parallel/schedules/ring.py", "both parts go the same way around",
    "[order, order[::-1]]", "[order, order]",
    f"{_SCHEDULES}/builders_test.py::test_traffic_is_even_over_all_links",
  ),
  Mutant(
    "parallel/schedules/grid.py", "all flows go in one direction",
    "for direction in (1, -1)\n", "for direction in (1, 1)\n",
    f"{_SCHEDULES}/builders_test.py::test_traffic_is_even_over_all_links",
  ),
  Mutant(
    "parallel/schedules/double_tree.py", "no edges have precedence",
    "turns = [set(edges) for edges in partial_permutations(down)]",
    "turns = [set(down)]",
    f"{_SCHEDULES}/builders_test.py::test_double_tree_s_rounds",
  ),
  Mutant(
    "parallel/schedules/double_tree.py", "both trees are the first one",
    "return [first, second]", "return [first, first]",
    f"{_SCHEDULES}/builders_test.py::test_double_tree_s_rounds",
  ),
  Mutant(
    "parallel/schedules/pairwise.py", "Swing without its mirror image",
    "for mirror in (1, -1)\n", "for mirror in (1, 1)\n",
    f"{_SCHEDULES}/builders_test.py::test_swing_uses_all_ports_of_a_torus",
  ),
  Mutant(
    "parallel/schedules/pairwise.py", "Swing without its rotations",
    "dims[first:] + dims[:first], mirror)", "dims, mirror)",
    f"{_SCHEDULES}/builders_test.py::test_swing_uses_all_ports_of_a_torus",
  ),
  Mutant(
    "parallel/schedules/pairwise.py", "Swing's distances only grow",
    "distance = mirror * (1 - (-2) ** (step + 1)) // 3",
    "distance = mirror * (2 ** (step + 1) - 1)",
    f"{_SCHEDULES}/builders_test.py::test_swing_s_partners",
  ),
  Mutant(
    "parallel/schedules/pairwise.py", "HDRM's upper switches are not turned",
    "turn = (half - port) % half", "turn = 0",
    f"{_SCHEDULES}/builders_test.py::test_hdrm_s_load",
  ),
  Mutant(
    "parallel/schedules/direct.py", "all send to rank 0 first",
    "there = (source + distance) % n",
    "there = distance - (distance <= source)",
    f"{_SCHEDULES}/builders_test.py::test_a_direct_exchange_starts_everywhere",
  ),
  Mutant(
    "parallel/schedules/multitree.py", "links are tried in order of numbers",
    'np.argsort(sources, kind="stable")',
    "np.lexsort((self._heads, sources))",
    f"{_SCHEDULES}/builders_test.py::test_multitree_s_steps",
  ),
  Mutant(
    "parallel/schedules/schedule.py", "a reduce-scatter runs forwards",
    "for transfers in reversed(rounds)\n", "for transfers in rounds\n",
    f"{_SCHEDULES}/builders_test.py::"
    "test_a_reduce_scatter_walks_an_all_gather_back[ring]",
  ),
  Mutant(
    "parallel/schedules/check.py", "a missing chunk is accepted",
    "if copies[chunk] != everyone:", "if copies[chunk] > everyone:",
    f"{_SCHEDULES}/builders_test.py::"
    "test_a_broken_schedule_is_refused[the last round is missing]",
  ),
  Mutant(
    "parallel/schedules/check.py", "a summand may count twice",
    "elif mine & mask:", "elif mine == mask:",
    f"{_SCHEDULES}/builders_test.py::"
    "test_a_broken_schedule_is_refused[a transfer twice]",
  ),
  Mutant(
    "parallel/schedules/check.py", "a full link is not full",
    "if load > rooms[pair]:", "if load > 2 * rooms[pair]:",
    f"{_SCHEDULES}/builders_test.py::test_two_chunks_do_not_fit_one_link",
  ),
  Mutant(
    "parallel/schedules/run.py", "a round reads what it has written",
    "sent = _take(before, jnp.asarray(step.reads)[ranks])",
    "sent = _take(chunks, jnp.asarray(step.reads)[ranks])",
    f"{_SCHEDULES}/run_test.py::test_a_round_reads_the_state_before_it",
  ),
  Mutant(
    "parallel/schedules/table.py", "a chunk is overwritten before it is sent",
    "fits = len(sources) == len(destinations) == len(more)",
    "more, fits = [transfer], True",
    f"{_SCHEDULES}/table_test.py::"
    "test_a_chunk_is_sent_before_it_is_overwritten",
  ),
  Mutant(
    "parallel/schedules/colouring.py", "an edge's share is that of its slot",
    "low, high = slot[0] * num_colours, slot[1] * num_colours",
    "low, high = slot[0] * num_colours, slot[0] * num_colours + 1",
    f"{_NETWORK}/flows_test.py::test_colourings",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "a write does not wait for readers",
    "writes[held][-1:] + reads.pop(held, [])", "writes[held][-1:]",
    f"{_SCHEDULES}/msccl_test.py::test_a_write_waits_for_those_who_read",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "what is wrong is written",
    "  check(schedule)\n", "",
    f"{_SCHEDULES}/msccl_test.py::test_what_is_wrong_is_not_written",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "one channel for all peers",
    "count = max(1, -(-colouring.largest_degree(pairs) // MAX_PEERS))",
    "count = 1",
    f"{_SCHEDULES}/msccl_test.py::"
    "test_no_channel_has_more_peers_than_a_runtime_takes",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "a file is for no size",
    '"maxBytes": str(max_bytes)', '"maxBytes": str(min_bytes)',
    f"{_SCHEDULES}/msccl_test.py::test_a_file_says_for_which_sizes_it_is",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "nops before a step take no place",
    "step.place = end + max(len(step.after) - 1, 0)", "step.place = end",
    f"{_SCHEDULES}/msccl_test.py::test_round_trip",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "threadblocks are no elements",
    "elements += 1 + count", "elements += count",
    f"{_SCHEDULES}/msccl_test.py::"
    "test_all_elements_that_a_loader_reads_are_counted",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "other GPUs are no elements",
    "elements = 1 + schedule.num_ranks", "elements = 1",
    f"{_SCHEDULES}/msccl_test.py::"
    "test_all_elements_that_a_loader_reads_are_counted",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "one element too many is written",
    "MAX_ELEMENTS - 1)", "MAX_ELEMENTS)",
    f"{_SCHEDULES}/msccl_test.py::"
    "test_all_elements_that_a_loader_reads_are_counted",
  ),
  Mutant(
    "parallel/schedules/msccl/exporter.py", "a threadblock too far is awaited",
    '"the last,", number, MAX_AWAITED,',
    '"the last,", number - 1, MAX_AWAITED,',
    f"{_SCHEDULES}/msccl_test.py::"
    "test_the_last_threadblock_that_others_wait_for_has_a_number",
  ),
  Mutant(
    "parallel/schedules/msccl/importer.py", "writers do not wait for readers",
    "others = [self._written.get(place, number), *self._read.pop(place, ())]",
    "others = [self._written.get(place, number)]",
    f"{_SCHEDULES}/msccl_test.py::test_wrong_files_are_named",
  ),
  Mutant(
    "parallel/schedules/msccl/importer.py", "readers do not wait for writers",
    "return self._unordered([self._written.get(place, number)])", "return None",
    f"{_SCHEDULES}/msccl_test.py::test_wrong_files_are_named",
  ),
  Mutant(
    "parallel/schedules/msccl/importer.py", "an output may lack its chunks",
    "if value != newest:\n          raise ValueError(\n"
    '            f"gpu {rank}: place',
    "if value is newest:\n          raise ValueError(\n"
    '            f"gpu {rank}: place',
    f"{_SCHEDULES}/msccl_test.py::test_wrong_files_are_named",
  ),
  Mutant(
    "parallel/schedules/msccl/importer.py", "sums of a round wait in line",
    "follows(a.number, b.number, 0 if sums else 1)",
    "follows(a.number, b.number, 1)",
    f"{_SCHEDULES}/msccl_test.py::test_sums_of_one_round_arrive_in_any_order",
  ),
  Mutant(
    "parallel/schedules/msccl/importer.py", "a value is read as it arrives",
    "follows(message.number, reader.number, 1)",
    "follows(message.number, reader.number, 0)",
    f"{_SCHEDULES}/msccl_test.py::"
    "test_rounds_that_values_do_not_allow_are_put_right",
  ),
  Mutant(
    "parallel/schedules/msccl/importer.py", "a step without a round is early",
    "if None in labels:\n    labels = [0] * len(labels)",
    "if None in labels:\n    labels = [label or 0 for label in labels]",
    f"{_SCHEDULES}/msccl_test.py::"
    "test_rounds_are_the_earliest_unless_all_steps_have_theirs",
  ),
  Mutant(
    "parallel/schedules/optimal/cut_bound.py", "switches count as ranks",
    "y = Fraction(leaving, sum(node < n for node in cut))",
    "y = Fraction(leaving, len(cut))",
    f"{_SCHEDULES}/optimal_test.py::test_the_bound_is_the_tightest_of_all_cuts",
  ),
  Mutant(
    "parallel/schedules/optimal/packing.py", "roots outside a set are free",
    "return max(0, min(most, int(flow) - total))", "return max(0, most)",
    f"{_SCHEDULES}/optimal_test.py::"
    "test_the_busiest_link_is_as_busy_as_the_bound",
  ),
  Mutant(
    "parallel/schedules/optimal/splitting.py", "a split unit takes a loop",
    "del kept[kept.index(node):]", "pass",
    f"{_SCHEDULES}/optimal_test.py::test_paths_visit_no_node_twice",
  ),
  Mutant(
    "parallel/schedules/optimal/trees.py", "long chains do not go first",
    "ready += [(-height[p[-1]], chunk, p) for p in after[root]]",
    "ready += [(height[p[-1]], chunk, p) for p in after[root]]",
    f"{_SCHEDULES}/optimal_test.py::test_rounds_add_little_to_the_busiest_link",
  ),
  Mutant(
    "parallel/schedules/ring.py", "one cycle's links vouch for the other's",
    "direct = all(len(t.path) == 2 for transfers in rounds for t in transfers)",
    "direct = all(len(t.path) == 2 for t in rounds[0][:n])",
    f"{_SCHEDULES}/builders_test.py::"
    "test_two_rings_on_a_one_way_link_claim_no_room",
  ),
  Mutant(
    "parallel/schedules/schedule.py", "the gather's claim is the scatter's",
    "link_capacity=None if None in capacities else max(capacities),",
    "link_capacity=gather.link_capacity,",
    f"{_SCHEDULES}/builders_test.py::"
    "test_an_all_reduce_claims_what_both_halves_keep",
  ),
  Mutant(
    "parallel/schedules/multitree.py", "the nearest roots take turns first",
    "(-far[rank], -rank)", "(far[rank], -rank)",
    f"{_SCHEDULES}/builders_test.py::"
    "test_the_farthest_roots_take_their_turns_first",
  ),
  Mutant(
    "parallel/schedules/multitree.py", "all parents try the lowest rank first",
    "else (self._heads[link] - parent) % n", "else self._heads[link] - n",
    f"{_SCHEDULES}/builders_test.py::test_multitree_s_steps",
  ),
  Mutant(
    "parallel/schedules/multitree.py", "a way of two links is short enough",
    "if 0 < len(best) <= self._shortest:", "if 0 < len(best) <= 2:",
    f"{_SCHEDULES}/builders_test.py::"
    "test_multitree_takes_the_way_with_the_fewest_links",
  ),
  Mutant(
    "parallel/schedules/multitree.py", "steps last as long as the slowest link",
    "  if not topology.even:\n", "  if False:\n",
    f"{_SCHEDULES}/growth_test.py::"
    "test_a_slow_link_costs_multitree_little_more_than_none",
  ),
  Mutant(
    "parallel/schedules/growth.py", "links are free always",
    "self._free[link] = start + self._taken[link]",
    "self._free[link] = 0.0",
    f"{_SCHEDULES}/growth_test.py::"
    "test_a_slow_link_costs_multitree_little_more_than_none",
  ),
  Mutant(
    "parallel/schedules/growth.py", "trees grow as if there were no latency",
    "taken + (link.latency_s if size_bytes else 0.0)", "taken",
    f"{_SCHEDULES}/growth_test.py::"
    "test_small_messages_go_by_the_fewest_links",
  ),
  Mutant(
    "parallel/schedules/growth.py", "rounds are as long as the slowest takes",
    "key=lambda rounds: seconds(rounds, topology)", "key=len",
    f"{_SCHEDULES}/growth_test.py::"
    "test_rounds_of_uneven_links_are_not_all_as_long_as_the_slowest_takes",
  ),
  Mutant(
    "parallel/schedules/growth.py", "what was the soonest way is so for ever",
    "return end == self._planned[tree]", "return True",
    f"{_SCHEDULES}/growth_test.py::test_it_is_as_fast_as_the_growth_says",
  ),
  Mutant(
    "parallel/schedules/growth.py", "a way ends where the chunk is already",
    "if there not in came and there not in has:", "if there not in came:",
    f"{_SCHEDULES}/growth_test.py::"
    "test_every_chunk_goes_down_a_tree_of_its_own",
  ),
  Mutant(
    "parallel/schedules/pipeline.py", "a piece waits for the one before",
    "ready: dict[Pair, int] = collections.defaultdict(int)",
    "ready: dict[Pair, int] = collections.defaultdict(lambda: len(rounds))",
    f"{_SCHEDULES}/builders_test.py::test_pieces_follow_one_another",
  ),
  Mutant(
    "parallel/schedules/pipeline.py", "a copy overwrites what is still sent",
    "number = max(ready[t.source, t.chunk], sent[copy])",
    "number = ready[t.source, t.chunk]",
    f"{_SCHEDULES}/builders_test.py::test_every_builder_is_proven[ring_2d-all_reduce]",
  ),
  Mutant(
    "parallel/schedules/pipeline.py", "a piece goes on in the round it arrives",
    "ready[copy] = max(ready[copy], number + 1)",
    "ready[copy] = max(ready[copy], number)",
    f"{_SCHEDULES}/builders_test.py::test_pieces_follow_one_another",
  ),
  Mutant(
    "parallel/schedules/pipeline.py", "a round carries a piece a link",
    "for transfers in schedule.rounds\n    for pair, load in",
    "for transfers in schedule.rounds[:1]\n    for pair, load in",
    f"{_SCHEDULES}/builders_test.py::"
    "test_a_round_of_pieces_carries_no_more_than_one_of_chunks",
  ),
  Mutant(
    "parallel/schedules/optimal/cut_bound.py", "capacities of 33 bits",
    "largest = min(_FINEST, _LARGEST // max(n, math.ceil(max(into[:n]))))",
    "largest = _FINEST",
    f"{_SCHEDULES}/optimal_test.py::"
    "test_capacities_of_many_ranks_fit_32_bits",
  ),
  Mutant(
    "parallel/schedules/colouring.py", "heavy edges count as light ones",
    "sizes = [weight // unit for weight in weights]",
    "sizes = [1 for weight in weights]",
    f"{_NETWORK}/flows_test.py::test_laws_of_every_router",
  ),
]

_NETWORK_ROWS = [
  Mutant(
    "parallel/network/simulate.py", "a message is sent on while it arrives",
    "at = start_ns + times.arrival_ns[times.kinds]",
    "at = start_ns + times.busy_ns[times.kinds]",
    f"{_NETWORK}/simulate_test.py::test_astra_sim_to_the_nanosecond",
  ),
  Mutant(
    "parallel/network/simulate.py", "queues are last come first served",
    "ready = (queue.popleft(),)", "ready = (queue.pop(),)",
    f"{_NETWORK}/simulate_test.py::test_a_timeline_keeps_the_rules",
  ),
  Mutant(
    "parallel/network/simulate.py", "a round's arrivals come before its sends",
    "order = np.lexsort((rounds, buffers))",
    "order = np.lexsort((~arrives, rounds, buffers))",
    f"{_NETWORK}/simulate_test.py::"
    "test_a_pair_swaps_in_the_time_of_one_message",
  ),
  Mutant(
    "parallel/network/simulate.py", "the fullest link has no latency",
    "fullest = (work + tail)[work > 0].max(initial=0)",
    "fullest = (work + tail).max(initial=0)",
    f"{_NETWORK}/simulate_test.py::test_never_below_the_bound",
  ),
  Mutant(
    "parallel/network/simulate.py", "lockstep takes one latency a path",
    "np.add.at(slowest, routed.hop_transfers, latency[routed.hop_links])",
    "np.maximum.at(slowest, routed.hop_transfers, latency[routed.hop_links])",
    f"{_NETWORK}/simulate_test.py::"
    "test_lockstep_shares_a_link_and_adds_latencies",
  ),
  Mutant(
    "parallel/network/simulate.py", "queues are five messages longer",
    "    return longest\n", "    return longest + 5 * (longest > 0)\n",
    f"{_NETWORK}/simulate_test.py::"
    "test_a_queue_is_as_long_as_there_are_messages_waiting",
  ),
  Mutant(
    "parallel/network/routed.py", "the rest of the bytes is sent by nobody",
    "return each + np.diff(np.arange(num_chunks + 1) * rest // num_chunks)",
    "return np.full(num_chunks, each)",
    f"{_NETWORK}/simulate_test.py::test_bytes_of_a_link_are_the_schedule_s",
  ),
  Mutant(
    "parallel/network/routed.py", "what was never proven is timed",
    "  if prove:\n", "  if not prove:\n",
    f"{_NETWORK}/simulate_test.py::test_what_is_no_collective_is_not_timed",
  ),
  Mutant(
    "parallel/network/routed.py", "chunks times bytes overflow",
    "return each + np.diff(np.arange(num_chunks + 1) * rest // num_chunks)",
    "return np.diff(np.arange(num_chunks + 1) * int(size_bytes) // num_chunks)",
    f"{_NETWORK}/simulate_test.py::test_no_size_makes_a_negative_time",
  ),
  Mutant(
    "parallel/network/flows.py", "pieces do not go on where the last ended",
    "turn += parts\n", "turn += 1\n",
    f"{_NETWORK}/flows_test.py::test_ethereal_loads_every_link_as_spraying_does",
  ),
  Mutant(
    "parallel/network/flows.py", "a displaced flow looks at uplinks only",
    "key=lambda s: max(load[a, s], load[s, b])", "key=lambda s: load[a, s]",
    f"{_NETWORK}/flows_test.py::test_a_displaced_flow_looks_both_ways",
  ),
  Mutant(
    "parallel/network/flows.py", "the bound forgets what reaches a leaf",
    "for ends in ((a, -1), (-1, b), (a, b)):", "for ends in ((a, -1), (a, b)):",
    f"{_NETWORK}/flows_test.py::test_the_bound_is_of_every_set_of_links",
  ),
  Mutant(
    "parallel/network/flows.py", "a path has two links always",
    "hops = 4 if any(spines & set(pair) for pair in link_loads) else 2",
    "hops = 2",
    f"{_NETWORK}/flows_test.py::test_a_step_takes_its_slowest_link",
  ),
  Mutant(
    "parallel/network/traffic.py", "an all-reduce goes around once",
    '"all_reduce": (2 * (size - 1), size),', '"all_reduce": (size - 1, size),',
    f"{_NETWORK}/flows_test.py::"
    "test_rings_of_a_program_send_what_the_ledger_says",
  ),
  Mutant(
    "parallel/network/utilisation.py", "a gate opens a step early",
    "gate = (step + 1 + overlap) % self._method.sync_every",
    "gate = (step + overlap) % self._method.sync_every",
    f"{_NETWORK}/utilisation_test.py::test_equals_the_plain_recursion",
  ),
  Mutant(
    "parallel/network/utilisation.py", "latency keeps the link busy",
    "self._link = end\n", "self._link = end + self._latency_s\n",
    f"{_NETWORK}/utilisation_test.py::test_equals_the_plain_recursion",
  ),
  Mutant(
    "parallel/network/utilisation.py", "layer 0 hands a gradient down",
    "return (3 * self.num_layers - 1) * self.node_seconds",
    "return 3 * self.num_layers * self.node_seconds",
    f"{_NETWORK}/utilisation_test.py::test_one_layer_by_hand",
  ),
  Mutant(
    "parallel/network/trace.py", "bars are as long as messages travel",
    "link, start / 1e3, (end - start) / 1e3,",
    "link, start / 1e3, (arrival - start) / 1e3,",
    f"{_NETWORK}/simulate_test.py::test_a_trace_has_a_bar_for_every_hop",
  ),
]

_PLACES = [
  Mutant(
    "parallel/topology/builders.py", "a mesh wraps around",
    "if size > 1 and (wraps or 0 <= i + step < size):", "if size > 1:",
    f"{_TOPOLOGY}::test_builders",
  ),
  Mutant(
    "parallel/topology/builders.py", "uplinks are as fast as hosts' links",
    "found += _both(up, uplink_bandwidth, latency_s)",
    "found += _both(up, bandwidth, latency_s)",
    f"{_NETWORK}/flows_test.py::test_a_step_takes_its_slowest_link",
  ),
  Mutant(
    "parallel/topology/builders.py", "a rail joins another number of each node",
    "(rank, num_ranks + nodes + rank % gpus_per_node)",
    "(rank, num_ranks + nodes + (rank + rank // gpus_per_node) "
    "% gpus_per_node)",
    f"{_TOPOLOGY}::test_rails_join_equal_numbers",
  ),
  Mutant(
    "parallel/topology/text.py", "a config's bandwidth beats the text's",
    "options = {k: v for k, v in given.items() if v is not None} | options",
    "options |= {k: v for k, v in given.items() if v is not None}",
    f"{_TOPOLOGY}::test_a_text_says_what_its_links_are",
  ),
  Mutant(
    "parallel/topology/text.py", "one direction of a failed link stays",
    "pairs.append(pair[::-1])", "pass",
    f"{_TOPOLOGY}::test_a_text_says_what_its_links_are",
  ),
  Mutant(
    "parallel/topology/builders.py", "oversubscription counts no hosts",
    "hosts_per_leaf * bandwidth / spines / oversubscription",
    "bandwidth / oversubscription",
    f"{_TOPOLOGY}::test_a_text_says_what_its_links_are",
  ),
  Mutant(
    "parallel/topology/files.py", "numbered nodes are numbered anew",
    "    nodes = list(range(len(nodes)))\n", "    pass\n",
    f"{_TOPOLOGY}::test_a_graph_keeps_its_numbers_or_says_that_it_has_others",
  ),
  Mutant(
    "parallel/topology/graph.py", "all ways go over the first spine",
    "path.append(near[destination % len(near)])", "path.append(near[0])",
    f"{_TOPOLOGY}::test_equal_paths_are_spread_by_destination",
  ),
  Mutant(
    "parallel/topology/graph.py", "multiples are rounded up",
    "pair: int(amount * link.bandwidth / slowest * (1 + 1e-9))",
    "pair: math.ceil(amount * link.bandwidth / slowest * (1 - 1e-9))",
    f"{_TOPOLOGY}::"
    "test_a_link_has_room_for_what_its_bandwidth_carries_whole",
  ),
  Mutant(
    "parallel/topology/graph.py", "a one-way link passes for both ways",
    "(v, u) in links and links[v, u].bandwidth == link.bandwidth",
    "(v, u) in links",
    f"{_TOPOLOGY}::test_directions_of_unequal_bandwidth_are_not_symmetric",
  ),
  Mutant(
    "parallel/topology/files.py", "a file's bandwidths are ignored",
    "_number(place, key, entry.get(key, default))", "default",
    f"{_TOPOLOGY}::test_a_graph_comes_back_from_networkx_and_from_a_file",
  ),
  Mutant(
    "parallel/hardware/links.py", "a vendor's sum over both ways is not halved",
    '"NVLink 4", 900e9 / 2, None', '"NVLink 4", 900e9, None',
    "tests/parallel/hardware_test.py::test_published_totals",
  ),
  Mutant(
    "parallel/hardware/devices.py", "a chip's rate for each of its chiplets",
    "_flops(2307e12 / 2,", "_flops(2307e12,",
    "tests/parallel/hardware_test.py::test_published_totals",
  ),
  Mutant(
    "parallel/planner/partitions.py", "the backward costs as much again",
    "join(2 * forward,", "join(forward,",
    f"{_PARTITIONS}::test_a_step_by_hand",
  ),
  Mutant(
    "parallel/planner/partitions.py", "a flat exchange crosses levels alike",
    "inside *= sizes[name]", "pass",
    f"{_PARTITIONS}::test_reuse_moves_bytes_between_levels_and_adds_none",
  ),
  Mutant(
    "parallel/planner/partitions.py", "the front keeps what others beat",
    "smaller = not chosen or p.memory.total < chosen[-1].memory.total",
    "smaller = True",
    f"{_PARTITIONS}::test_the_front_is_what_no_other_beats[True]",
  ),
  Mutant(
    "parallel/planner/partitions.py", "half of the largest model",
    "low, high = (middle, high) if fits(middle) else (low, middle)",
    "low, high = (low, middle)",
    f"{_PARTITIONS}::test_memory_of_20b_and_the_largest_model",
  ),
  Mutant(
    "parallel/planner/schedules.py", "the slowest candidate is chosen",
    "return min(choices, key=lambda choice: choice.seconds)",
    "return max(choices, key=lambda choice: choice.seconds)",
    "tests/parallel/planner/schedules_test.py::"
    "test_what_is_chosen_is_no_slower_than_what_it_is_chosen_from",
  ),
  Mutant(
    "parallel/planner/schedules.py", "no schedule is cut into pieces",
    "for pieces in (2, 4, 8, 16, 32, 64):", "for pieces in ():",
    "tests/parallel/planner/schedules_test.py::"
    "test_pieces_make_up_for_depth",
  ),
  Mutant(
    "parallel/planner/schedules.py", "every machine has rounds of one chunk",
    'for capacity in (1,) if model == "events" else (1, 2, 16):',
    "for capacity in (1,):",
    "tests/parallel/planner/schedules_test.py::"
    "test_small_messages_want_few_rounds_and_large_ones_many",
  ),
  Mutant(
    "parallel/planner/schedules.py", "once in vain is the end",
    "if in_vain == 2:", "if in_vain == 1:",
    "tests/parallel/planner/schedules_test.py::"
    "test_pieces_are_doubled_until_it_is_in_vain_twice",
  ),
  Mutant(
    "parallel/planner/links.py", "the fewest bits are tried first",
    "for width in sorted(bits, reverse=True):", "for width in sorted(bits):",
    f"{_NETWORK}/utilisation_test.py::"
    "test_the_recommendation_is_the_first_that_reaches",
  ),
  Mutant(
    "parallel/planner/links.py", "the link's time is that of whole steps",
    "steps = target * exchange_s / model.compute_seconds",
    "steps = exchange_s / model.compute_seconds",
    f"{_NETWORK}/utilisation_test.py::"
    "test_no_recommendation_where_the_link_has_no_time",
  ),
]

_XLA_ROWS = [
  Mutant(
    "parallel/xla/ledger.py", "what reduces gradients is the forward",
    '"forward" if "jvp(" in path else "update"', '"forward"',
    f"{_XLA}/ledger_test.py::"
    "test_phases_of_a_step_that_reduces_its_gradients",
  ),
  Mutant(
    "parallel/xla/ledger.py", "a loop counts its body once",
    "_repeat(body, trips)", "_repeat(body, trips and 1)",
    f"{_XLA}/ledger_test.py::"
    "test_loops_multiply_and_an_unknown_trip_count_stays_unknown",
  ),
  Mutant(
    "parallel/xla/ledger.py", "a condition runs as often as the body",
    "checks = None if trips is None else trips + 1", "checks = trips",
    f"{_XLA}/ledger_test.py::"
    "test_the_condition_of_a_loop_runs_once_more_than_its_body",
  ),
  Mutant(
    "parallel/xla/entries.py", "branches that differ count as the first",
    "return all(other == first for other in others)", "return True",
    f"{_XLA}/ledger_test.py::"
    "test_a_conditional_counts_only_what_all_branches_send",
  ),
  Mutant(
    "parallel/xla/entries.py", "an all-gather is counted like a scatter",
    'if self.kind in ("reduce_scatter", "all_to_all"):',
    'if self.kind in ("reduce_scatter", "all_to_all", "permute"):',
    f"{_XLA}/ledger_test.py::test_every_kind_axis_dtype_and_shape",
  ),
  Mutant(
    "parallel/xla/entries.py", "an unknown count is forgotten",
    "key = dataclasses.replace(entry, count=0), entry.count is None",
    "key = dataclasses.replace(entry, count=0), False",
    f"{_XLA}/ledger_test.py::test_merging_keeps_what_is_known",
  ),
  Mutant(
    "parallel/xla/operations.py", "a loop up to and with its end is short",
    "    last += 1\n", "    last += 0\n",
    f"{_XLA}/ledger_test.py::test_trip_count_of_a_while_loop",
  ),
  Mutant(
    "parallel/xla/compiled.py", "each fusion of a chain sends",
    'if self.chain(instruction) and not any(',
    'if False and not any(',
    f"{_XLA}/overlap_test.py::test_a_chain_of_fusions_sends_once",
  ),
  Mutant(
    "parallel/xla/groups.py", "an iota of groups is not transposed",
    "return np.transpose(numbers, order).ravel()", "return numbers.ravel()",
    f"{_XLA}/compiled_test.py::test_replica_groups",
  ),
  Mutant(
    "parallel/xla/groups.py", "groups in an order of XLA's are in the mesh's",
    "if order is not None:", "if False:",
    f"{_XLA}/gspmd_test.py::"
    "test_automatic_sharding_sends_what_the_explicit_program_does",
  ),
  Mutant(
    "parallel/xla/groups.py", "a part of an axis is all of it",
    "if any(begin <= first < end for begin, end in spans):", "if spans:",
    f"{_XLA}/compiled_test.py::test_replica_groups",
  ),
  Mutant(
    "parallel/xla/groups.py", "groups that are not understood are one",
    """  if not groups:
    raise ValueError(f"the replica groups {text!r} have an unknown form")
""",
    "  groups = groups or [list(range(num_devices))]\n",
    f"{_XLA}/compiled_test.py::"
    "test_groups_of_an_unknown_form_are_an_error",
  ),
  Mutant(
    "parallel/xla/groups.py", "groups of a part of the mesh are of all of it",
    "if sets and numbers != set(range(self.num_devices)):",
    "if sets and max(numbers) >= self.num_devices:",
    f"{_XLA}/compiled_test.py::test_devices_of_another_mesh_are_an_error",
  ),
  Mutant(
    "parallel/xla/compiled.py", "branches alike have an unknown count",
    "lambda branches: alike(map(self.collectives, branches))",
    "lambda branches: False",
    f"{_XLA}/compiled_test.py::"
    "test_a_conditional_counts_where_its_branches_send_the_same",
  ),
  Mutant(
    "parallel/xla/compiled.py", "an unknown count makes no difference",
    "sent = Sent(count, known, unknown + entry.bytes)",
    "sent = Sent(count, known, unknown)",
    f"{_STUDIES}/compilation_test.py::"
    "test_tables_show_what_runs_an_unknown_number_of_times",
  ),
  Mutant(
    "parallel/xla/hlo.py", "a loop's condition runs as often as its body",
    '(("condition", 1), ("body", 0))', '(("condition", 0), ("body", 0))',
    f"{_XLA}/overlap_test.py::"
    "test_the_condition_of_a_loop_sends_once_more_than_its_body",
  ),
  Mutant(
    "parallel/xla/overlap.py", "a loop's compute hides transfers twice",
    "return times * self._schedule(name)[1]",
    "return self._inclusive(computation, instruction).seconds",
    f"{_XLA}/overlap_test.py::"
    "test_a_loop_hides_its_own_transfers_or_those_around_it",
  ),
  Mutant(
    "parallel/xla/overlap.py", "transfers of unknown count run once",
    """      row["unknown_bytes"] += t.bytes
      continue
""",
    """      row["unknown_bytes"] += t.bytes
      t = dataclasses.replace(t, count=1)
""",
    f"{_XLA}/overlap_test.py::test_transfers_of_unknown_count_are_told_apart",
  ),
  Mutant(
    "parallel/xla/overlap.py", "compute hides several transfers at once",
    "left[i] -= share\n", "left[i] -= 0 * share\n",
    f"{_XLA}/overlap_test.py::"
    "test_compute_beside_two_transfers_hides_one_of_them",
  ),
  Mutant(
    "parallel/xla/overlap.py", "a loop hides as much as one trip",
    "return sum(inside, Cost()) * times", "return sum(inside, Cost())",
    f"{_XLA}/overlap_test.py::"
    "test_what_stands_between_start_and_done_hides_the_transfer",
  ),
  Mutant(
    "parallel/xla/overlap.py", "every dimension of a torus is a ring",
    "closed = (spanned == extent) & np.array(closes)",
    "closed = spanned == extent",
    f"{_XLA}/overlap_test.py::"
    "test_a_torus_uses_every_dimension_that_a_group_spans",
  ),
  Mutant(
    "parallel/xla/overlap.py", "a loop of unknown length has nine trips",
    "return 1 if trips is None else trips, instruction",
    "return trips or 9, instruction",
    f"{_XLA}/overlap_test.py::"
    "test_a_loop_of_unknown_length_hides_as_much_as_one_trip",
  ),
  Mutant(
    "parallel/xla/overlap.py", "a transfer ends where it is updated",
    'if not order[index].opcode.endswith("-update"):', "if True:",
    f"{_XLA}/overlap_test.py::"
    "test_a_transfer_that_is_updated_goes_on_until_its_done",
  ),
  Mutant(
    "parallel/hardware/slices.py", "a plane closes at every multiple of 4",
    "else 16)", "else 4)",
    f"{_XLA}/overlap_test.py::"
    "test_a_plane_closes_to_a_ring_where_it_has_16_chips",
  ),
  Mutant(
    "parallel/xla/overlap.py", "each device has a link of its own",
    "level.link.bandwidth * level.links_per_device", "level.link.bandwidth",
    f"{_XLA}/overlap_test.py::"
    "test_devices_that_share_a_link_or_lie_anywhere_take_longer",
  ),
  Mutant(
    "parallel/xla/overlap.py", "a group that no axes describe is one device",
    "name in entry.axes or not entry.axes else 0", "name in entry.axes else 0",
    f"{_XLA}/overlap_test.py::"
    "test_devices_that_share_a_link_or_lie_anywhere_take_longer",
  ),
  Mutant(
    "parallel/xla/roofline.py", "an addition is free",
    "return 2.0 * output.elements * contracted",
    "return 1.0 * output.elements * contracted",
    f"{_XLA}/compiled_test.py::test_product_flops_and_trips",
  ),
  Mutant(
    "parallel/xla/roofline.py", "a slice reads the whole array",
    "total += sum(s.bytes for s in user.shapes)",
    "total += sum(s.bytes for s in value.shapes)",
    f"{_XLA}/overlap_test.py::"
    "test_slices_count_what_is_sliced_and_on_chip_operands_nothing",
  ),
  Mutant(
    "parallel/xla/roofline.py", "padding is multiplied",
    "inside = 0 <= position < (size - 1) * base_dilation + 1",
    "inside = position < (size - 1) * base_dilation + 1",
    f"{_XLA}/compiled_test.py::test_pairs_of_a_convolution",
  ),
  Mutant(
    "caatnet/studies/compilation/programs.py", "all axes share their links",
    'busiest = max((row["seconds"] for row in rows), default=0.0)',
    'busiest = sum(row["seconds"] for row in rows)',
    f"{_STUDIES}/compilation_test.py::test_bounds_of_a_step",
  ),
  Mutant(
    "parallel/hardware/slices.py", "a slice has as many chips as one likes",
    "if chips > self.most_chips:", "if chips > self.most_chips**2:",
    "tests/parallel/hardware_test.py::test_slices_are_those_that_exist",
  ),
  Mutant(
    "parallel/hardware/slices.py", "a slice of cubes has any dims",
    "if max(topology) > 4 and any(size % 4 for size in topology):",
    "if max(topology) > 4 and all(size % 4 for size in topology):",
    "tests/parallel/hardware_test.py::test_slices_are_those_that_exist",
  ),
  Mutant(
    "parallel/xla/memory.py", "donated results are counted again",
    "analysis.output_size_in_bytes - analysis.alias_size_in_bytes",
    "analysis.output_size_in_bytes",
    f"{_XLA}/compiled_test.py::test_memory_is_xlas_to_the_byte",
  ),
  Mutant(
    "parallel/xla/hlo.py", "a loop's trips are rounded down",
    "return max(0, -((first - last) // step))  # rounded up",
    "return max(0, (last - first) // step)",
    f"{_XLA}/overlap_test.py::test_trips_are_rounded_up",
  ),
]

_MODELS = [
  Mutant(
    "caatnet/models/transformer/block.py", "the MLP's update drops the stream",
    "x = x + row_parallel(y, self.w_down[...], axis, sync_mlp, kernels)",
    "x = Stream(0 * x.shared, 0 * x.private) + row_parallel("
    "y, self.w_down[...], axis, sync_mlp, kernels)",
    f"{_MODEL}::test_any_p_is_the_rank_oracle_on_any_devices[1-True-0.5]",
  ),
  Mutant(
    "caatnet/models/transformer/block.py", "the MLP synchronises as attention",
    "axis, sync_mlp, kernels)", "axis, sync_attention, kernels)",
    f"{_MODEL}::test_p_may_differ_per_layer_and_door[4-2]",
  ),
  Mutant(
    "caatnet/models/transformer/module.py", "padded tokens have a logit",
    "y = jnp.where(padded[:, None, None, :], -jnp.inf, y)",
    "y = jnp.where(padded[:, None, None, :], 0.0, y)",
    f"{_MODEL}::test_fully_synchronised_is_the_dense_model[4-changes3]",
  ),
  Mutant(
    "caatnet/models/transformer/block.py", "output projections are too large",
    "out_std = std / math.sqrt(2 * config.num_layers)", "out_std = std",
    f"{_MODEL}::test_matrices_are_drawn_as_in_gpt_2",
  ),
  Mutant(
    "caatnet/models/transformer/positions.py", "positions turn the other way",
    "[first * cos - second * sin, second * cos + first * sin]",
    "[first * cos + second * sin, second * cos - first * sin]",
    f"{_MODEL}::test_any_p_is_the_rank_oracle_on_any_devices[1-True-0.5]",
  ),
  Mutant(
    "caatnet/models/transformer/layers.py", "the gate is on the wrong half",
    "return jax.nn.silu(gate) * up", "return gate * jax.nn.silu(up)",
    f"{_MODEL}::test_any_p_is_the_rank_oracle_on_any_devices[1-True-0.5]",
  ),
  Mutant(
    "caatnet/models/transformer/attention.py", "a query sees one key less",
    "visible = key_position <= query_position",
    "visible = key_position < query_position + (start == 0)",
    f"{_MODEL}::test_blocks_of_queries_are_one_attention",
  ),
  Mutant(
    "caatnet/models/transformer/attention.py", "a window is one too wide",
    "visible &= key_position > query_position - window",
    "visible &= key_position >= query_position - window",
    f"{_FAMILIES}::test_blocks_of_queries_see_their_window",
  ),
  Mutant(
    "caatnet/models/transformer/attention.py",
    "a block of queries begins one key late",
    "first = max(0, start + 1 - window) if window else 0",
    "first = max(0, start + 2 - window) if window else 0",
    f"{_FAMILIES}::test_blocks_of_queries_see_their_window",
  ),
  Mutant(
    "caatnet/models/transformer/positions.py",
    "short wavelengths are stretched", "(1 - stays) / self.factor",
    "stays / self.factor",
    f"{_FAMILIES}::test_llama_3_stretches_long_wavelengths_only",
  ),
  Mutant(
    "caatnet/models/transformer/positions.py",
    "stretched wavelengths are the roots of theirs",
    "scaling(base ** (-np.arange(half) / half))",
    "scaling(base ** (-np.arange(half) / x.shape[-1]))",
    f"{_FAMILIES}::test_a_family_is_the_dense_model",
  ),
  Mutant(
    "caatnet/models/transformer/layers.py", "keys have the gain of queries",
    "k = rms_norm(k, params.key_gain, heads.eps)",
    "k = rms_norm(k, params.query_gain, heads.eps)",
    f"{_FAMILIES}::test_a_family_is_the_dense_model",
  ),
  Mutant(
    "caatnet/models/transformer/layers.py", "keys have an eps of their own",
    "k = rms_norm(k, params.key_gain, heads.eps)",
    "k = rms_norm(k, params.key_gain, 1e-5)",
    f"{_FAMILIES}::test_norms_of_heads_add_the_config_s_eps",
  ),
  Mutant(
    "caatnet/models/transformer/model.py", "gains decay",
    'P(), int(in_block), "float32", decays=False,',
    'P(), int(in_block), "float32",',
    f"{_TRAIN}/step_test.py::test_only_matrices_decay",
  ),
  Mutant(
    "caatnet/models/transformer/model.py", "a tied table is read once",
    "uses=2 if tied else 1,", "uses=1,",
    f"{_MODEL}::test_what_a_partition_must_know_of_a_table",
  ),
  Mutant(
    "caatnet/models/transformer/config.py", "kv heads are not counted",
    "heads, d = self.num_heads + self.num_kv_heads",
    "heads, d = 2 * self.num_heads, self.head_width",
    f"{_MODEL}::test_sizes_count_parameters",
  ),
  Mutant(
    "caatnet/models/transformer/config.py", "a tied head multiplies nothing",
    "products += self.vocab_size * self.width\n", "products += 0\n",
    f"{_MODEL}::test_flops_are_six_per_weight_of_a_product",
  ),
  Mutant(
    "caatnet/models/transformer/communication.py", "full remat sends all again",
    'if config.remat == "full" and (door == 0 or carried):',
    'if config.remat == "full":',
    f"{_MODEL}::test_lowered_collectives_equal_the_formula[full-1-1-0.5]",
  ),
  Mutant(
    "caatnet/models/transformer/communication.py", "gains go with microbatches",
    'count[Reduction("update", "float32", shape)] += 1',
    'count[Reduction("update", "float32", shape)] += accumulation',
    f"{_MODEL}::test_lowered_collectives_equal_the_formula[full-2-1-0.5]",
  ),
  Mutant(
    "caatnet/models/convolutional.py", "blocks forget their input",
    "return x + self.conv_2(jax.nn.relu(self.norm_2(y)))",
    "return self.conv_2(jax.nn.relu(self.norm_2(y)))",
    "tests/caatnet/models/convolutional_test.py::"
    "test_the_network_is_its_oracle",
  ),
  Mutant(
    "caatnet/models/convolutional.py", "the head looks at one place",
    ".mean(axis=(1, 2))", ".mean(axis=1)[:, 0]",
    "tests/caatnet/models/convolutional_test.py::"
    "test_the_network_is_its_oracle",
  ),
  Mutant(
    "caatnet/models/convolutional.py", "a stage's places are not quartered",
    "places //= 4 if stage else 1", "places //= 2 if stage else 1",
    "tests/caatnet/models/convolutional_test.py::"
    "test_flops_are_of_the_places_of_a_stage",
  ),
  Mutant(
    "caatnet/models/access.py", "layers run without their policy",
    "f = jax.checkpoint(f, policy=policy, prevent_cse=False)", "pass",
    f"{_MODEL}::test_lowered_collectives_equal_the_formula[full-1-1-0.5]",
  ),
  Mutant(
    "caatnet/program.py", "a device prices the parameters of all",
    "count //= axis.devices", "pass",
    "tests/caatnet/program_test.py::"
    "test_prices_are_of_one_device_s_parameters",
  ),
]

_TRAINING = [
  Mutant(
    "caatnet/train/step.py", "the gradient is a sum over data ranks",
    "lambda x: x / layout.num_data_ranks, (loss, grads)",
    "lambda x: x, (loss, grads)",
    f"{_LINEAR}::test_a_step_is_sgd_on_each_worker_s_mean[ddp-0.0]",
  ),
  Mutant(
    "caatnet/train/step.py", "microbatches are summed",
    "return jax.tree.map(lambda x: x / accumulation, total)",
    "return total",
    f"{_LINEAR}::test_a_step_is_sgd_on_each_worker_s_mean[zero3-0.0]",
  ),
  Mutant(
    "caatnet/train/step.py", "small gradients are clipped up",
    "factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))",
    "factor = clip_norm / jnp.maximum(norm, 1e-12)",
    f"{_LINEAR}::test_a_step_is_sgd_on_each_worker_s_mean[ddp-99.0]",
  ),
  Mutant(
    "caatnet/train/norms.py", "each shard is clipped by its own norm",
    "summed = lax.psum(stacked, names) if names else stacked",
    "summed = lax.psum(stacked / lax.axis_size(names), names) "
    "if names else stacked",
    f"{_LINEAR}::test_a_step_is_sgd_on_each_worker_s_mean[zero1-0.5]",
  ),
  Mutant(
    "caatnet/train/step.py", "gains have one rank's gradient",
    "return lax.psum(grad, over) if over",
    "return lax.pmean(grad, over) if over",
    f"{_TRAIN}/step_test.py::test_lanes_are_devices[mesh0]",
  ),
  Mutant(
    "caatnet/train/step.py", "the moments of the last step stay",
    "state.step + 1, params, opt_state, carried, state.key",
    "state.step + 1, params, state.opt_state, carried, state.key",
    f"{_LINEAR}::test_a_step_is_sgd_on_each_worker_s_mean[ddp-0.0]",
  ),
  Mutant(
    "caatnet/train/evaluate.py", "padded rows are judged, too",
    "x.reshape(batch_size, *x.shape[num_dims + 1 :])[:count]",
    "x.reshape(batch_size, *x.shape[num_dims + 1 :])",
    f"{_TRAIN}/evaluate_test.py::"
    "test_rows_that_fill_a_batch_up_do_not_count[ddp-13]",
  ),
  Mutant(
    "caatnet/train/evaluate.py", "the loss is a tenth too low",
    "return self.means[\"loss\"]", "return 0.9 * self.means[\"loss\"]",
    f"{_TRAIN}/evaluate_test.py::"
    "test_rows_that_fill_a_batch_up_do_not_count[ddp-8]",
  ),
  Mutant(
    "caatnet/train/evaluate.py", "a logged mean is a tenth too low",
    "float(x.mean(dtype=np.float64))", "0.9 * float(x.mean(dtype=np.float64))",
    f"{_LINEAR}::test_records_are_of_the_step_that_they_name",
  ),
  Mutant(
    "caatnet/train/loop.py", "the logged rate is that of six steps later",
    "rate = self.experiment.learning_rate(step - 1)",
    "rate = self.experiment.learning_rate(step + 5)",
    f"{_LINEAR}::test_records_are_of_the_step_that_they_name",
  ),
  Mutant(
    "caatnet/train/loop.py", "a resumed run reads the first batches again",
    "self.batches.set_state(position)", "pass",
    f"{_LINEAR}::test_stopped_and_resumed_is_uninterrupted",
  ),
  Mutant(
    "caatnet/train/loop.py", "worker 0's parameters are judged",
    "params = self.evaluated(self.state.params, self.state.outer)",
    "params = jax.tree.map(lambda x: x[0], self.state.params)",
    f"{_LINEAR}::test_records_are_of_the_step_that_they_name",
  ),
  Mutant(
    "caatnet/train/loop.py", "a stop saves nothing",
    "if not finished:\n      self._save(last=True)", "if not finished:",
    f"{_LINEAR}::test_stopped_and_resumed_is_uninterrupted",
  ),
  Mutant(
    "caatnet/train/loop.py", "divergence is blamed on the other groups",
    "if not math.isfinite(values[f\"grad_norm/{group}\"])",
    "if math.isfinite(values[f\"grad_norm/{group}\"])",
    f"{_LINEAR}::test_a_diverged_run_says_where_and_what_is_left",
  ),
  Mutant(
    "caatnet/train/checkpoint.py", "an evaluation reads the oldest checkpoint",
    "return steps[-1] if step is None else step",
    "return steps[0] if step is None else step",
    f"{_LINEAR}::test_an_evaluation_reads_the_checkpoint_that_it_names",
  ),
  Mutant(
    "caatnet/train/checkpoint.py", "reads end after their loop has closed",
    "asyncio.set_event_loop_policy(_Loops())", "pass",
    "tests/caatnet/train/files_test.py::"
    "test_no_read_of_a_damaged_checkpoint_finds_its_loop_closed",
  ),
  Mutant(
    "caatnet/train/checkpoint.py", "damaged numbers are a fault of ours",
    "cause = error.__cause__ if type(error) is Exception else error",
    "cause = error",
    "tests/launch/generate_test.py::test_a_damaged_checkpoint_is_one_line",
  ),
  Mutant(
    "caatnet/train/checkpoint.py", "moments start anew",
    'opt_state=read.rest["opt_state"],',
    'opt_state=jax.tree.map(lambda x: 0 * x, read.rest["opt_state"]),',
    f"{_LINEAR}::test_stopped_and_resumed_is_uninterrupted",
  ),
  Mutant(
    "caatnet/train/records.py", "records after the checkpoint stay",
    'if first_step and record["step"] <= first_step', "if True",
    f"{_TRAIN}/records_test.py::"
    "test_metrics_after_the_checkpoint_are_written_again",
  ),
  Mutant(
    "caatnet/train/records.py", "a run goes on with another config",
    "if not free and stored.get(key) != ours.get(key):",
    "if not free and key not in stored:",
    f"{_TRAIN}/records_test.py::"
    "test_a_folder_goes_on_with_its_own_config_only",
  ),
  Mutant(
    "caatnet/train/records.py", "a resumed run may have another seed",
    'key[0] in ("zero", "pipeline", "inference")', 'key[0] in ("zero", "seed")',
    f"{_TRAIN}/records_test.py::"
    "test_a_folder_goes_on_with_its_own_config_only",
  ),
  Mutant(
    "caatnet/train/records.py", "a resumed run may have another schedule",
    "or (key == _DECAY_STEPS and old == new)", "or key == _DECAY_STEPS",
    f"{_TRAIN}/records_test.py::"
    "test_a_folder_goes_on_with_its_own_config_only",
  ),
  Mutant(
    "caatnet/train/records.py", "a run may be made shorter",
    "ours.get(_NUM_STEPS, 0) > stored", "ours.get(_NUM_STEPS, 0) != stored",
    f"{_TRAIN}/records_test.py::"
    "test_a_folder_goes_on_with_its_own_config_only",
  ),
  Mutant(
    "caatnet/train/records.py", "a schedule of the run's own changes with it",
    "return flat.get(_DECAY_STEPS) or flat.get(_NUM_STEPS)",
    "return flat.get(_NUM_STEPS)",
    f"{_TRAIN}/records_test.py::test_a_run_may_be_made_longer",
  ),
  Mutant(
    "caatnet/train/records.py", "the same workers may have other weights",
    "or (moved and key in (_WORKER, *_OF_WORKERS))",
    "or key in (_WORKER, *_OF_WORKERS)",
    f"{_TRAIN}/records_test.py::"
    "test_what_is_said_of_workers_changes_with_their_number_only",
  ),
  Mutant(
    "caatnet/train/records.py", "a torn last line is an error",
    'if not line.endswith("\\n"):', "if not line:",
    f"{_TRAIN}/records_test.py::"
    "test_metrics_after_the_checkpoint_are_written_again",
  ),
  Mutant(
    "caatnet/train/files.py", "files are emptied and written again",
    "temporary = path.with_name(own)\n",
    "yield path\n  return\n  temporary = path.with_name(own)\n",
    f"{_TRAIN}/files_test.py::test_killed_at_any_write_a_run_goes_on",
  ),
  Mutant(
    "caatnet/train/files.py", "several trainers have the lock",
    "fcntl.flock(file, fcntl.LOCK_EX", "fcntl.flock(file, fcntl.LOCK_SH",
    f"{_TRAIN}/files_test.py::test_a_folder_has_one_trainer",
  ),
  Mutant(
    "caatnet/train/files.py", "two writers share a temporary file",
    'own = f".{path.stem}.{os.getpid()}_{secrets.token_hex(4)}{path.suffix}"',
    'own = f".{path.stem}.tmp{path.suffix}"',
    f"{_TRAIN}/files_test.py::test_two_writers_of_a_file_leave_one_s_text",
  ),
  Mutant(
    "caatnet/train/files.py", "what could not be written stays",
    "temporary.unlink(missing_ok=True)", "pass",
    f"{_TRAIN}/files_test.py::test_a_full_disk_is_one_line",
  ),
  Mutant(
    "caatnet/train/checkpoint.py", "a reader deletes what is being written",
    "if keep is not None:\n", "if True:\n",
    f"{_TRAIN}/files_test.py::"
    "test_every_checkpoint_of_a_live_run_can_be_read",
  ),
  Mutant(
    "caatnet/train/loop.py", "the newest checkpoint is good, whatever it holds",
    "(s for s in steps if s <= last_good)", "(s for s in steps)",
    f"{_LINEAR}::test_a_checkpoint_is_good_if_its_loss_is_finite",
  ),
  Mutant(
    "caatnet/train/loop.py", "parameters that are not finite are saved",
    "if of_workers.all() if self.leaves_out else of_workers.any():",
    "if False:",
    f"{_LINEAR}::test_a_checkpoint_is_good_if_its_loss_is_finite",
  ),
  Mutant(
    "caatnet/train/loop.py", "throughput is that of the whole run",
    "collections.deque[float](maxlen=_WINDOW)",
    "collections.deque[float](maxlen=None)",
    f"{_LINEAR}::test_throughput_is_that_of_the_last_steps",
  ),
  Mutant(
    "caatnet/train/metrics.py", "metrics from elsewhere change places",
    "list(stacked))", "list(stacked[::-1]))",
    "tests/launch/processes_test.py::"
    "test_workers_on_two_processes_train_and_stop_as_one",
  ),
  Mutant(
    "caatnet/train/stop.py", "each process stops for itself",
    "return multihost_utils.reached_preemption_sync_point(self.asked)",
    "return self.signalled",
    "tests/launch/processes_test.py::"
    "test_workers_on_two_processes_train_and_stop_as_one",
  ),
  Mutant(
    "caatnet/interop/huggingface.py", "a run is written into what it is of",
    "  if pathlib.Path(os.path.realpath(source)) in (",
    "  if source in (",
    "tests/caatnet/interop/wrong_test.py::"
    "test_a_folder_that_cannot_be_made_is_known_first",
  ),
  Mutant(
    "parallel/kernels/paged_attention/tpu.py", "lanes of replicas are lanes",
    "attend(size * lanes)(", "attend(size)(",
    "tests/parallel/kernels/paged_attention_test.py::"
    "test_lanes_of_replicas_are_one_kernel",
  ),
  Mutant(
    "caatnet/inference/generate.py", "a table lacks the newest token's page",
    "*(s.num_read + 1 for each in decodes", "*(s.num_read for each in decodes",
    "tests/caatnet/inference/generate_test.py::"
    "test_tables_grow_with_their_sequences",
  ),
  Mutant(
    "launch/generate.py", "half a text is told as a whole one",
    "  return signalled.exit_code\n", "  return 0\n",
    "tests/launch/generate_test.py::"
    "test_an_interrupted_text_is_kept_and_told_from_a_whole_one",
  ),
  Mutant(
    "launch/options.py", "a reader that leaves has read all",
    "return 141", "return 0",
    "tests/launch/options_test.py::"
    "test_ctrl_c_and_a_reader_that_leaves_have_their_codes",
  ),
  Mutant(
    "launch/options.py", "Ctrl-C is a mistake in a flag",
    "return 130", "return 2",
    "tests/launch/options_test.py::"
    "test_ctrl_c_and_a_reader_that_leaves_have_their_codes",
  ),
  Mutant(
    "caatnet/train/state.py", "what is not finite on other devices is missed",
    "return jax.lax.psum(jnp.stack(counts), names)",
    "return jax.lax.pmax(jnp.stack(counts) * (jax.lax.axis_index(names) == 0), "
    "names)",
    f"{_LINEAR}::test_what_is_not_finite_is_found_wherever_it_lies",
  ),
  Mutant(
    "launch/processes.py", "every warning is taken for the end",
    "fatal = any(_FATAL in line for line in held)", "fatal = bool(held)",
    "tests/launch/processes_test.py::test_only_the_end_is_condensed",
  ),
  Mutant(
    "caatnet/train/traffic.py", "an exchange counts in every step",
    "* count / outer.period", "* count",
    f"{_TRAIN}/records_test.py::"
    "test_a_step_s_traffic_is_the_mean_over_a_period",
  ),
  Mutant(
    "caatnet/train/traffic.py", "counts of loops are left out",
    "size = np.array([c.bytes, c.wire_bytes_ring]) * c.count",
    "size = np.array([c.bytes, c.wire_bytes_ring])",
    f"{_TRAIN}/records_test.py::"
    "test_a_summary_adds_up_what_goes_over_the_same_axes",
  ),
  Mutant(
    "caatnet/train/state.py", "workers that differ in one bit pass",
    "weights = 2 * jnp.arange(bits.shape[1], dtype=jnp.uint32) + 1",
    "weights = 0 * jnp.arange(bits.shape[1], dtype=jnp.uint32)",
    f"{_LINEAR}::test_workers_that_start_apart_are_an_error",
  ),
  Mutant(
    "caatnet/train/whole.py", "a stored state is cut in another order",
    "x = layout.shards.store(x, leaf.tensor)",
    "x = layout.shards.store(x[..., ::-1], leaf.tensor)",
    f"{_LINEAR}::test_what_is_stored_is_restored",
  ),
  Mutant(
    "caatnet/models/transformer/module.py", "rows beside a vocabulary's slice",
    "        mine &= ids[place] == tokens\n", "",
    f"{_TRAIN}/stages_test.py::test_a_model_in_stages_trains_as_in_one_piece",
  ),
  Mutant(
    "caatnet/train/staged.py", "data ranks are mapped at once",
    "  one = f(jax.tree.map(lambda x: x[0], batch))\n"
    "  return jax.tree.map(lambda x: x[None], one)",
    "  return jax.vmap(f)(batch)",
    f"{_TRAIN}/stages_test.py::test_buffers_are_updated_in_place",
  ),
  Mutant(
    "caatnet/stages.py", "chunks of a stage follow one another",
    "return np.swapaxes(chunks, 0, 1).reshape(", "return chunks.reshape(",
    f"{_TRAIN}/stages_test.py::test_a_model_in_stages_trains_as_in_one_piece",
  ),
  Mutant(
    "caatnet/stages.py", "a stage's last slice is cut off",
    "count = -(-size // self.axis.size)", "count = size // self.axis.size",
    f"{_TRAIN}/stages_test.py::"
    "test_checkpoints_have_the_shapes_and_bits_of_one_piece",
  ),
  Mutant(
    "caatnet/train/sweep.py", "the last key of a grid varies alone",
    "for point in points\n", "for point in points[:1]\n",
    "tests/launch/sweep_test.py::test_a_grid_is_all_combinations",
  ),
]

_DATA_ROWS = [
  Mutant(
    "caatnet/data/pipeline.py", "windows share no byte",
    "return (len(self._text) - 1) // self._seq_len",
    "return (len(self._text) - self._seq_len) // self._seq_len",
    f"{_DATA}/pipeline_test.py::test_an_epoch_has_each_window_once",
  ),
  Mutant(
    "caatnet/data/pipeline.py", "all epochs have one order",
    ".shuffle(shuffle_seed).repeat()",
    ".shuffle(shuffle_seed).repeat(reseed_each_epoch=False)",
    f"{_DATA}/pipeline_test.py::test_each_epoch_and_each_seed_has_its_own_order",
  ),
  Mutant(
    "caatnet/data/pipeline.py", "the validation text's end is never read",
    "num_tokens - (seq_len + 1)", "num_tokens - 2 * (seq_len + 1)",
    f"{_DATA}/pipeline_test.py::test_validation_windows_are_even_and_disjoint",
  ),
  Mutant(
    "caatnet/data/sources.py", "copies may lie on both sides",
    "digest = hashlib.sha256(document).digest()\n",
    "digest = hashlib.sha256(str(id(document)).encode()).digest()\n",
    f"{_DATA}/sources_test.py::"
    "test_folder_split_is_a_partition_that_keeps_copies_together",
  ),
  Mutant(
    "caatnet/data/baselines.py", "bytes are conditioned on the byte after",
    "log_probs[windows[:, :-1], windows[:, 1:]]",
    "log_probs[windows[:, 1:], windows[:, :-1]]",
    f"{_DATA}/baselines_test.py::test_add_one_smoothing_by_hand",
  ),
  Mutant(
    "caatnet/data/text.py", "bits are nats times ln 2",
    "loss / math.log(2)", "loss * math.log(2)",
    "tests/caatnet/show/tables_test.py::"
    "test_an_evaluation_as_data_and_as_tables",
  ),
  Mutant(
    "caatnet/data/text.py", "bits have three values",
    "loss / math.log(2)", "loss / math.log(3)",
    "tests/caatnet/show/tables_test.py::"
    "test_an_evaluation_as_data_and_as_tables",
  ),
  Mutant(
    "caatnet/data/sources.py", "a validation text of one's own is trained on",
    "for document in documents if document not in held_out]",
    "for document in documents if held_out]",
    f"{_DATA}/sources_test.py::"
    "test_a_validation_text_of_one_s_own_is_not_trained_on",
  ),
  Mutant(
    "caatnet/data/sources.py", "the hash leaves the validation text out",
    '.sha256(f"{sha256} {other}".encode())', ".sha256(sha256.encode())",
    f"{_DATA}/sources_test.py::"
    "test_a_validation_text_of_one_s_own_is_not_trained_on",
  ),
  Mutant(
    "caatnet/data/images.py", "copies in the validation file stay",
    "held_out = np.array([image.tobytes() in known for image in images])",
    "held_out = np.array([not known for image in images])",
    f"{_DATA}/images_test.py::test_images_of_one_s_own_to_validate_on",
  ),
  Mutant(
    "caatnet/data/images.py", "bytes of pixels are not scaled",
    "scale = 255 if images.dtype == np.uint8 else 1", "scale = 1",
    f"{_DATA}/images_test.py::test_a_file_s_pixels_lie_between_0_and_1",
  ),
  Mutant(
    "caatnet/data/images.py", "the farthest class mean is chosen",
    "distances.argmin(axis=0)", "distances.argmax(axis=0)",
    f"{_DATA}/images_test.py::test_baselines_by_hand",
  ),
]

_BUILD_ROWS = [
  Mutant(
    "caatnet/build/optimizer.py", "the rate always decays over all steps",
    "end = decay_steps or num_steps", "end = num_steps",
    f"{_BUILD}::test_the_rate_decays_over_the_steps_that_a_key_names",
  ),
  Mutant(
    "caatnet/build/sections.py", "an unknown key is accepted",
    "if key not in keys:\n", "if key not in values:\n",
    f"{_BUILD}::test_a_section_has_its_builder_s_keys_and_no_others",
  ),
  Mutant(
    "caatnet/build/outer.py", "momentum and pull change places",
    "worker, self.every, self.learning_rate, self.momentum,\n      self.pull,",
    "worker, self.every, self.learning_rate, self.pull,\n      self.momentum,",
    f"{_BUILD}::test_keys_of_an_outer_loop_arrive_under_their_names[noloco]",
  ),
  Mutant(
    "caatnet/build/outer.py", "the residual decays by the outer rate",
    "self.error_decay, self.chunk, self.top_k,",
    "self.learning_rate, self.chunk, self.top_k,",
    f"{_BUILD}::test_keys_of_an_outer_loop_arrive_under_their_names"
    "[sparseloco]",
  ),
  Mutant(
    "caatnet/build/outer.py", "the strength of the compensation is ignored",
    "self.exchange(program, seed), self.compensation\n",
    "self.exchange(program, seed), 0.2\n",
    "tests/caatnet/build/keys_test.py"
    "::test_every_key_of_an_outer_loop_changes_it[dc_s3gd-changes6]",
  ),
  Mutant(
    "caatnet/build/outer.py", "Adam has its own momentum",
    "optax.adam(self.learning_rate, b1=self.momentum)",
    "optax.adam(self.learning_rate)",
    "tests/caatnet/build/keys_test.py"
    "::test_every_key_of_an_outer_loop_changes_it[diloco-changes9]",
  ),
  Mutant(
    "caatnet/build/outer.py", "error feedback is not switched on",
    "self.error_feedback, seed, rule", "False, seed, rule",
    f"{_BUILD}::test_keys_of_an_outer_loop_arrive_under_their_names[diloco]",
  ),
  Mutant(
    "caatnet/build/sync.py", "the MLP's doors have attention's fractions",
    'door("p_mlp", p_mlp)', 'door("p_mlp", p_attention)',
    f"{_BUILD}::test_each_door_has_its_own_fraction",
  ),
  Mutant(
    "caatnet/build/zero.py", "levels are counted from outside",
    "names = [level.name for level in found[::-1]]",
    "names = [level.name for level in found]",
    f"{_BUILD}::test_levels_of_a_partition_are_counted_from_inside",
  ),
  Mutant(
    "caatnet/build/optimizer.py", "gains decay with the matrices",
    "weight_decay=weight_decay, mask=decays", "weight_decay=weight_decay",
    f"{_BUILD}::test_adamw_is_its_equation",
  ),
  Mutant(
    "caatnet/build/optimizer.py", "the rate ends at its fraction, not of it",
    "end_value=peak * final_fraction", "end_value=final_fraction",
    f"{_BUILD}::test_sgd_is_its_equation",
  ),
  Mutant(
    "caatnet/build/override.py", "an override changes the config itself",
    "config = config.copy_and_resolve_references()", "pass",
    f"{_BUILD}::test_an_override_has_a_key_and_its_type",
  ),
  Mutant(
    "caatnet/build/experiments.py", "a run's numbers are not checked",
    "  ranges.check(config)\n", "",
    f"{_RANGES}::test_nothing_is_built_of_a_number_out_of_its_range",
  ),
  Mutant(
    "caatnet/models/transformer/attention.py", "splash takes any sequence",
    "seq_len % 128 == 0,", "seq_len >= 128,",
    f"{_MODEL}::test_attention_is_the_fastest_that_fits",
  ),
  Mutant(
    "caatnet/models/transformer/attention.py", "keys have no gradient",
    "k[:, first:stop], v[:, first:stop], start - first,",
    "lax.stop_gradient(k[:, first:stop]), v[:, first:stop], start - first,",
    f"{_MODEL}::test_blocks_of_queries_are_one_attention",
  ),
  Mutant(
    "caatnet/models/transformer/attention.py", "a kernel's gradient is of ones",
    "return jax.vjp(kernel, q, k, v)[1](cotangent)",
    "return jax.vjp(kernel, q, k, v)[1](jnp.ones_like(cotangent))",
    f"{_MODEL}::test_a_flash_kernel_has_its_own_gradient",
  ),
  Mutant(
    "caatnet/data/text.py", "a token may equal the size of the vocabulary",
    "self.vocab_size <= largest:", "self.vocab_size < largest:",
    f"{_DATA}/text_test.py"
    "::test_a_vocabulary_has_the_largest_token_of_the_data",
  ),
  Mutant(
    "caatnet/data/text.py", "tokens that are held out need no row",
    "largest = max(int(corpus.train.max()), int(corpus.validation.max()))",
    "largest = int(corpus.train.max())",
    f"{_DATA}/text_test.py"
    "::test_a_vocabulary_has_the_largest_token_of_the_data",
  ),
  Mutant(
    "caatnet/studies/registry.py", "a study's numbers are not checked",
    "  ranges.check(config)\n", "",
    f"{_RANGES}::test_nothing_is_built_of_a_number_out_of_its_range",
  ),
  Mutant(
    "caatnet/ranges.py", "infinite numbers are in every open range",
    "if not abs(value) <= _HUGE:", "if value != value:",
    f"{_RANGES}::test_no_number_is_negative_infinite_or_no_number"
    "[optimizer.clip_norm]",
  ),
  Mutant(
    "caatnet/ranges.py", "what float32 takes for 1 is below 1",
    "value = np.float32(value) if", "value = value if",
    f"{_RANGES}::test_bounds",
  ),
  Mutant(
    "caatnet/ranges.py", "a decay may be 1",
    "(value < self.high if self.below else value <= self.high)",
    "(value <= self.high)",
    f"{_RANGES}::test_bounds",
  ),
]

_STUDIES_ROWS = [
  Mutant(
    "caatnet/studies/collectives/study.py", "a rank's links are one each way",
    "slowest = min(*out[:n], *into[:n])",
    "slowest = net.links[0].bandwidth",
    f"{_STUDIES}/collectives_test.py::test_bound_of_the_ranks_links",
  ),
  Mutant(
    "caatnet/studies/collectives/study.py", "a rank sends all that all send",
    "max(1 / slowest, 2 * (n - 1) / together)",
    "max(2 * (n - 1) / n / slowest, 2 * (n - 1) / together)",
    f"{_STUDIES}/collectives_test.py::test_bound_of_the_ranks_links",
  ),
  Mutant(
    "caatnet/studies/collectives/study.py", "a speedup is a slowdown",
    'over["over ring"].append(cell["ring"][model] / ours[model])',
    'over["over ring"].append(ours[model] / cell["ring"][model])',
    f"{_STUDIES}/collectives_test.py::test_a_speedup_is_their_time_over_ours",
  ),
  Mutant(
    "caatnet/studies/collectives/study.py", "the rival is the worst of all",
    "over[\"over the best other\"].append(min(others) / ours[model])",
    "over[\"over the best other\"].append(max(others) / ours[model])",
    f"{_STUDIES}/collectives_test.py::"
    "test_a_speedup_is_their_time_over_ours",
  ),
  Mutant(
    "caatnet/studies/flows/study.py", "a step of a program counts once",
    'steps = {sent: count * entry["count"]}', "steps = {sent: count}",
    f"{_STUDIES}/collectives_test.py::"
    "test_a_program_s_collectives_take_their_ring",
  ),
  Mutant(
    "caatnet/studies/schedule/study.py", "the barrier is not one",
    "barrier = simulate.events(routed, size, barrier=True)",
    "barrier = simulate.events(routed, size)",
    f"{_STUDIES}/collectives_test.py::test_a_schedule_s_times_are_in_order",
  ),
  Mutant(
    "caatnet/studies/utilisation/study.py", "one's own factor is left out",
    "[(own, own_factor)]", "[(own, 1.0)]",
    f"{_STUDIES}/utilisation_test.py::"
    "test_a_model_of_one_s_own_has_the_paper_s_table_and_curves",
  ),
  Mutant(
    "caatnet/studies/utilisation/study.py", "bytes pass for bits",
    "bandwidth = 8 * link.bandwidth", "bandwidth = link.bandwidth",
    f"{_STUDIES}/utilisation_test.py::"
    "test_the_result_is_json_and_its_setting_reaches_the_target",
  ),
  Mutant(
    "caatnet/studies/partitions/study.py", "the paper's ratio is turned over",
    "slow[key] / fast[key]", "fast[key] / slow[key]",
    f"{_STUDIES}/partitions_test.py::"
    "test_tables_say_what_is_assumed_and_what_is_not_reproduced",
  ),
  Mutant(
    "caatnet/studies/partitions/tables.py", "every ratio is within ours",
    "low <= paper <= high", "low <= paper",
    f"{_STUDIES}/partitions_test.py::"
    "test_tables_say_what_is_assumed_and_what_is_not_reproduced",
  ),
  Mutant(
    "caatnet/studies/compilation/partition.py", "lanes send nothing twice",
    "*arguments, accumulation=accumulation, lanes=lanes",
    "*arguments, accumulation=1, lanes=lanes",
    f"{_STUDIES}/compilation_test.py::"
    "test_a_partition_s_formula_stands_beside_the_program",
  ),
  Mutant(
    "caatnet/show/tables.py", "seeds are compared with the first seed",
    'run["validation_loss"] - first[seed]["validation_loss"]',
    'run["validation_loss"] - min(first.items())[1]["validation_loss"]',
    "tests/caatnet/show/tables_test.py::test_points_are_compared_seed_by_seed",
  ),
  Mutant(
    "caatnet/show/tables.py", "all axes are the tensor axis",
    'if r["axis"] == "tensor" and r["phase"] == phase]',
    'if r["phase"] == phase]',
    "tests/caatnet/show/tables_test.py::test_bytes_of_one_phase_and_sizes",
  ),
  Mutant(
    "caatnet/show/pictures.py", "p = 1 is a point of every number of ranks",
    'if same or (row["p"] == 1.0 and row["tensor"] == line[0]):',
    'if same or row["p"] == 1.0:',
    "tests/caatnet/show/pictures_test.py::test_a_line_is_of_one_number_of_ranks",
  ),
]

_DOCUMENTS_ROWS = [
  Mutant(
    "caatnet/show/documents.py", "a table that differs is not named",
    "if body != match[\"body\"]:", "if not body:",
    f"{_DOCUMENTS}::test_a_figure_that_was_changed_is_named_and_put_right",
  ),
  Mutant(
    "caatnet/show/documents.py", "a mark without the other is passed over",
    "if len(marks) != 2 * len(_TABLE.findall(text)):", "if not marks:",
    f"{_DOCUMENTS}::test_marks_that_are_wrong_are_errors",
  ),
  Mutant(
    "docs/tables.py", "the range of seeds is the first and the last",
    "for f in (mean, min, max)",
    "for f in (mean, lambda d: d[0], lambda d: d[-1])",
    f"{_DOCUMENTS}::test_tables_are_what_results_say",
  ),
  Mutant(
    "parallel/kernels/evidence.py", "p = 1 is like any other p",
    "if (q == 1.0) == (p == 1.0)]", "]",
    f"{_DOCUMENTS}::test_kernels_are_taken_where_they_make_a_step_faster",
  ),
  Mutant(
    "caatnet/build/transformer.py",
    "a route's kernel goes by add_norm's steps",
    "context.evidence_of is None or doors[0].route in FUSED_ROUTES",
    "context.evidence_of is None",
    "tests/caatnet/build/kernels_test.py::"
    "test_auto_takes_the_kernels_that_help",
  ),
  Mutant(
    "parallel/xla/fingerprint.py", "a kernel's lines are in its fingerprint",
    'jax.config.update("jax_traceback_in_locations_limit", 0)', "pass",
    "tests/parallel/xla/fingerprint_test.py::"
    "test_a_line_above_a_kernel_changes_nothing",
  ),
  Mutant(
    "parallel/xla/fingerprint.py", "all programs have one fingerprint",
    "lowered.as_text().encode()", 'b""',
    "tests/parallel/xla/fingerprint_test.py::"
    "test_another_kernel_has_another_fingerprint",
  ),
  Mutant(
    "launch/benchmarks/programs.py", "a row of another target is taken",
    '    "target": target.name,\n', "",
    "tests/launch/programs_test.py::"
    "test_a_row_is_known_until_its_program_is_another",
  ),
  Mutant(
    "caatnet/show/notebooks.py", "today's first cell is not asked for",
    ") or sources(kept) != sources(prepared(path))", ")",
    "tests/colabs_test.py::test_a_changed_cell_is_stale",
  ),
  Mutant(
    "caatnet/show/notebooks.py", "a clone is made again, into the old one",
    'if not pathlib.Path("caatnet").exists():', "if True:",
    "tests/colabs_test.py::test_on_colab_the_first_cell_clones_and_installs",
  ),
]

_GENERATION = [
  Mutant(
    "parallel/kernels/paged_attention/tpu.py", "all lanes read lane 0's pages",
    "head += lane * (k // blocks.heads)", "head += 0 * lane",
    "tests/parallel/kernels/paged_attention_test.py::"
    "test_each_rank_has_its_own_heads",
  ),
  Mutant(
    "parallel/kernels/paged_attention/api.py",
    "jax's kernels slice out each lane's pages",
    "if not mapped or x not in library.NAMES", "if x",
    "tests/parallel/kernels/paged_attention_test.py::"
    "test_the_order_suits_the_platform_s_kernels",
  ),
  Mutant(
    "parallel/kernels/paged_attention/order.py",
    "one token's write copies all pages", "if len(slots) == 1:",
    "if len(slots) == 0:",
    "tests/caatnet/inference/decoding_test.py::"
    "test_one_sequence_s_token_is_written_in_place",
  ),
  Mutant(
    "caatnet/inference/copies.py", "pages come back in ascending order",
    "return (*[slice(None)] * (self._dim + 1), list(pages))",
    "return (*[slice(None)] * (self._dim + 1), sorted(pages))",
    "tests/caatnet/inference/copies_test.py::"
    "test_a_run_comes_back_elsewhere_and_nothing_else_changes",
  ),
  Mutant(
    "caatnet/serving/device.py", "a step does not wait for its copies",
    "while self._unwritten.intersection(step.after):",
    "while self._unwritten.intersection(()):",
    "tests/caatnet/serving/device_test.py::"
    "test_everyone_gets_what_a_run_alone_gives",
  ),
  Mutant(
    "caatnet/serving/measured.py", "a chunk pays for the decodes beside it",
    "max(0.0, seconds - rest) / count", "seconds / count",
    "tests/caatnet/serving/measured_test.py::"
    "test_a_chunk_costs_what_steps_without_one_do_not",
  ),
  Mutant(
    "caatnet/inference/batches.py", "a decode is written into its first page",
    "pages = tables[slots, positions // page_size]",
    "pages = tables[slots, 0 * positions]",
    "tests/caatnet/serving/device_test.py::"
    "test_everyone_gets_what_a_run_alone_gives",
  ),
  Mutant(
    "caatnet/serving/device.py", "a slot draws as the one who had it before",
    "      self._drawing.set(slot, chunk.request.payload.drawing)\n",
    "      if not self._drawing.of(np.array([slot])).seed[0]:\n"
    "        self._drawing.set(slot, chunk.request.payload.drawing)\n",
    "tests/caatnet/serving/device_test.py::"
    "test_everyone_gets_what_a_run_alone_gives",
  ),
  Mutant(
    "caatnet/serving/calibration.py", "the compiler's time is a copy's",
    "      if time:  #", "      if not time:  #",
    "tests/caatnet/serving/device_test.py::"
    "test_the_first_choice_is_made_by_what_was_measured",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "a token depends on its slot",
    "seed[:, None], positions[:, None].astype(jnp.uint32),",
    "seed[:, None], jnp.arange(seed.size, dtype=jnp.uint32)[:, None],",
    f"{_SAMPLING}::test_slot_and_batch_do_not_decide",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "each rank draws the same noise",
    "token_ids[:, None].astype(jnp.uint32),\n    )",
    "(token_ids - token_ids[:, :1])[:, None].astype(jnp.uint32),\n    )",
    f"{_SAMPLING}::test_ranks_and_devices_do_not_decide",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "top-p weighs what top-k has left out",
    "weights = jnp.where(z >= floor[:, None], jnp.exp(z), 0.0)",
    "weights = jnp.exp(z)",
    f"{_SAMPLING}::test_a_token_is_the_one_drawn_by_hand",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "filters replace min-p",
    "kept &= _of_ranks_here(", "kept = _of_ranks_here(",
    f"{_SAMPLING}::test_a_token_is_the_one_drawn_by_hand",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "logits are rounded again for the floor",
    "kept &= _of_ranks_here(_kept(everyone, sampling), axis)",
    "kept &= scaled >= _floor(everyone, sampling)[:, None]",
    "tests/caatnet/inference/generate_test.py::"
    "test_the_last_token_that_top_k_keeps_is_drawn",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "log-probabilities are of scaled logits",
    "at_best(noisy), at_best(shifted),", "at_best(noisy), at_best(scaled),",
    f"{_SAMPLING}::test_a_token_is_the_one_drawn_by_hand",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "equal logits go to the last rank",
    "winner = jnp.argmax(noisy, axis=0)[None]",
    "winner = axis.size - 1 - jnp.argmax(noisy[::-1], axis=0)[None]",
    f"{_SAMPLING}::test_of_equal_logits_greedy_takes_the_lowest_id",
  ),
  Mutant(
    "caatnet/inference/sampling.py", "a sum is of the compiler's order",
    "  size = x.shape[-1]\n  width", "  return x.sum(-1)\n  width",
    f"{_SAMPLING}::test_slot_and_batch_do_not_decide",
  ),
  Mutant(
    "caatnet/inference/stops.py", "the first string of the list ends a text",
    "self.found = min(ends)", "self.found = ends[0]",
    f"{_STOPS}::test_cuts_do_not_decide_where_a_text_ends",
  ),
  Mutant(
    "caatnet/inference/stops.py", "the shortest possible beginning is held",
    "range(min(longest, len(text)), 0, -1)",
    "range(1, min(longest, len(text)) + 1)",
    f"{_STOPS}::test_text_is_shown_as_soon_as_it_can_be",
  ),
  Mutant(
    "caatnet/inference/stops.py", "half a character at the end is lost",
    "text = self._strings.push(self._stream.flush())", 'text = ""',
    f"{_STOPS}::test_why_a_sequence_ends",
  ),
  Mutant(
    "caatnet/inference/stops.py", "a stop string may hide in an end's rest",
    "    if self._strings.found is not None:\n"
    '      self.reason = "stop_string"\n      return text\n    return text +',
    "    return text +",
    f"{_STOPS}::test_why_a_sequence_ends",
  ),
  Mutant(
    "caatnet/inference/generate.py", "what has ended gets more tokens",
    "if transcript.ended:  # a step before", "if False:",
    f"{_GENERATE}::test_tokens_are_those_drawn_from_logits_without_a_cache",
  ),
  Mutant(
    "caatnet/inference/generate.py", "no request has filters",
    "self._filters = any(request.filters for request in requests)",
    "self._filters = False",
    f"{_GENERATE}::test_tokens_are_those_drawn_from_logits_without_a_cache",
  ),
  Mutant(
    "caatnet/inference/transcripts.py", "a text begins after its prompt",
    "request.prompt[-_NUM_BEFORE:]", "()",
    "tests/caatnet/inference/transcripts_test.py::"
    "test_a_first_word_keeps_the_space_before_it",
  ),
  Mutant(
    "caatnet/inference/requests.py", "a conversation is opened twice",
    "    start = ()\n", "",
    "tests/caatnet/inference/requests_test.py::test_a_prompt_is_opened_once",
  ),
  Mutant(
    "caatnet/show/completions.py", "a terminal obeys a model",
    "text.translate(_CONTROLS) if", "text if",
    "tests/caatnet/show/completions_test.py::"
    "test_a_terminal_is_not_told_what_to_do",
  ),
  Mutant(
    "launch/options.py", "every key of a run's config can be changed",
    'if not any(f"{match[2]}.".startswith(f"{name}.") for name in changeable):',
    "if False:",
    "tests/launch/options_test.py::test_other_keys_of_a_run_s_config_stay",
  ),
]

_SCORES = [
  Mutant(
    "caatnet/models/transformer/vocabulary.py",
    "of equal logits the highest token is greedy",
    "((a[0] == b[0]) & (a[1] < b[1]))", "((a[0] == b[0]) & (a[1] > b[1]))",
    f"{_SCORING}::test_the_greedy_choice_is_that_of_argmax",
  ),
  Mutant(
    "caatnet/models/transformer/vocabulary.py",
    "a lower token of another rank does not count",
    "choice < targets.tokens, -2.0, vote", "choice < targets.tokens, 0.0, vote",
    f"{_SCORING}::test_the_greedy_choice_is_that_of_argmax",
  ),
  Mutant(
    "caatnet/models/transformer/vocabulary.py",
    "each device has a greedy choice",
    "vote = jnp.where(best == largest, vote, 0.0)",
    "vote = jnp.where(best <= largest, vote, 0.0)",
    f"{_SCORING}::test_the_greedy_choice_is_that_of_argmax",
  ),
  Mutant(
    "caatnet/inference/scoring.py", "scores come in the order of lengths",
    "return [scores[index] for index in range(len(rows))]",
    "return list(scores.values())",
    f"{_SCORING}::test_scores_are_the_log_softmax_of_the_oracle[case0]",
  ),
  Mutant(
    "caatnet/inference/scoring.py", "rows are padded at their beginning",
    "batch[place, : len(row)] = row", "batch[place, -len(row) :] = row",
    f"{_SCORING}::test_scores_are_the_log_softmax_of_the_oracle[case0]",
  ),
  Mutant(
    "caatnet/inference/scoring.py", "every length is compiled by itself",
    "next(n for n in self._lengths if n >= longest)", "longest",
    f"{_SCORING}::test_scores_are_the_log_softmax_of_the_oracle[case0]",
  ),
  Mutant(
    "caatnet/interop/answers.py", "spaces at its end stay with the context",
    "split = len(self._encode(context.rstrip()))",
    "split = len(self._encode(context))",
    f"{_ANSWERS}::test_loglikelihoods_are_sums_by_hand",
  ),
  Mutant(
    "caatnet/interop/answers.py", "a window is a token too short",
    "tokens[max(0, stop - limit - 1) : stop]",
    "tokens[max(0, stop - limit) : stop]",
    f"{_ANSWERS}::test_windows_score_each_token_once",
  ),
  Mutant(
    "caatnet/interop/answers.py", "one greedy token makes all greedy",
    "judged.greedy[last].all()", "judged.greedy[last].any()",
    f"{_ANSWERS}::test_a_continuation_is_greedy_if_each_token_is",
  ),
  Mutant(
    "caatnet/interop/answers.py", "a token of the context is scored, too",
    "slice(len(window.tokens) - 1 - window.num_targets, None)",
    "slice(max(0, len(window.tokens) - 2 - window.num_targets), None)",
    f"{_ANSWERS}::test_loglikelihoods_are_sums_by_hand",
  ),
  Mutant(
    "caatnet/interop/answers.py", "prompts do not begin with their tokens",
    "tokens = [*self._tokenizer.start_ids, *self._encode(context)]",
    "tokens = self._encode(context)",
    f"{_ANSWERS}::test_a_request_to_generate_is_read",
  ),
  Mutant(
    "caatnet/interop/answers.py", "a task that does not sample does",
    "temperature=0.0 if samples is False else temperature",
    "temperature=temperature",
    f"{_ANSWERS}::test_a_request_to_generate_is_read",
  ),
]

_TOKENIZERS = [
  Mutant(
    "caatnet/data/token_streams.py", "half a run of bytes is given out",
    'return "" if _BYTE.fullmatch(name) else self._take(last=False)',
    "return self._take(last=False)",
    f"{_DATA}/tokenizers_test.py::test_a_stream_gives_the_text_of_all_tokens",
  ),
  Mutant(
    "caatnet/data/token_streams.py", "every token is the first of a text",
    "self._before, self._held = self._held[-1:] or self._before, []",
    "self._held = []",
    f"{_DATA}/tokenizers_test.py::test_a_stream_gives_the_text_of_all_tokens",
  ),
  Mutant(
    "caatnet/data/token_streams.py", "half a character is given out",
    "if not last and text.endswith(_REPLACEMENT):", "if not last and not text:",
    f"{_DATA}/tokenizers_test.py::test_a_stream_gives_the_text_of_all_tokens",
  ),
  Mutant(
    "caatnet/data/token_streams.py", "a stream gives all at its end",
    "if not last and text.endswith(_REPLACEMENT):", "if not last:",
    f"{_DATA}/tokenizers_test.py::test_nothing_that_is_complete_waits",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "special tokens are spelled",
    "[int(i) for i in ids if i not in self._special_ids]",
    "[int(i) for i in ids]",
    f"{_DATA}/tokenizers_test.py::test_special_tokens_have_no_text",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "a document ends where it quotes its end",
    "library.encode_special_tokens = True", "pass",
    f"{_DATA}/encoding_test.py::test_between_separators_are_the_documents",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "no prompt has special tokens any more",
    "library.encode_special_tokens = False", "pass",
    f"{_DATA}/encoding_test.py::test_between_separators_are_the_documents",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "an identity is of no normalizer",
    '"truncation", "padding")', '"truncation", "padding", "normalizer")',
    f"{_DATA}/tokenizers_test.py"
    "::test_an_identity_is_of_what_decides_the_tokens",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "an identity is of how batches are padded",
    '"truncation", "padding")', '"truncation")',
    f"{_DATA}/tokenizers_test.py"
    "::test_an_identity_is_of_what_decides_the_tokens",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "an identity is not of a document's end",
    '"separator": self.separator,', '"separator": None,',
    f"{_DATA}/tokenizers_test.py"
    "::test_an_identity_is_of_what_decides_the_tokens",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "one token ends a text, whatever is listed",
    "return tuple(listed)", "return tuple(listed[:1])",
    f"{_DATA}/tokenizers_test.py::test_what_ends_texts_and_documents",
  ),
  Mutant(
    "caatnet/data/tokenizers.py", "all of a template's tokens open a prompt",
    "count = added.index(0) if 0 in added else 0", "count = sum(added) + 1",
    f"{_DATA}/tokenizers_test.py::test_a_prompt_opens_as_the_library_says",
  ),
  Mutant(
    "caatnet/data/chat.py", "templates run without a sandbox",
    "sandbox.ImmutableSandboxedEnvironment(", "jinja2.Environment(",
    f"{_DATA}/tokenizers_test.py"
    "::test_a_template_can_refuse_but_not_break_out",
  ),
  Mutant(
    "caatnet/data/encoding.py", "a separator stands for no byte",
    "join(sizes, [1] * len(between))", "join(sizes, [0] * len(between))",
    f"{_DATA}/encoding_test.py::test_tokens_stand_for_all_bytes_of_the_text",
  ),
  Mutant(
    "caatnet/data/encoding.py", "no character has four bytes",
    "(0x80, 0x800, 0x10000)", "(0x80, 0x800)",
    f"{_DATA}/encoding_test.py::test_sizes_by_hand",
  ),
  Mutant(
    "caatnet/data/encoding.py", "what ends a document is lost",
    "    reached[-1] = ends[-1]\n", "    pass\n",
    f"{_DATA}/encoding_test.py::test_what_is_left_out_counts_to_what_follows",
  ),
  Mutant(
    "caatnet/data/text.py", "bits per byte are bits per token",
    "bits_per_token / bytes_per_token", "bits_per_token",
    f"{_DATA}/text_test.py"
    "::test_bits_are_per_byte_of_the_text_that_is_evaluated",
  ),
  Mutant(
    "caatnet/data/text.py", "the text before the targets counts",
    "targets = places[:, 1:]", "targets = places",
    f"{_DATA}/text_test.py"
    "::test_bits_are_per_byte_of_the_text_that_is_evaluated",
  ),
  Mutant(
    "caatnet/data/text.py", "xz sees other text than the model",
    "ends[places[:, 0]], ends[places[:, -1]]",
    "ends[places[:, 1]], ends[places[:, -1]]",
    f"{_DATA}/text_test.py"
    "::test_bits_are_per_byte_of_the_text_that_is_evaluated",
  ),
  Mutant(
    "caatnet/data/text.py", "a tokenizer's last token needs no row",
    "(tokenizer.vocab_size - 1, tokenizer.name)",
    "(tokenizer.vocab_size - 2, tokenizer.name)",
    f"{_DATA}/text_test.py"
    "::test_a_vocabulary_has_the_largest_token_of_the_tokenizer",
  ),
  Mutant(
    "caatnet/train/tokenizer.py", "a tokenizer is known by its name",
    "stored.identity != tokenizer.identity", "stored.name != tokenizer.name",
    f"{_KEPT}::test_a_run_has_the_whole_tokenizer",
  ),
  Mutant(
    "caatnet/train/tokenizer.py", "copies may change",
    'recorded["sha256"] != found.identity', 'recorded["sha256"] == ""',
    f"{_KEPT}::test_what_has_become_of_a_kept_tokenizer",
  ),
  Mutant(
    "caatnet/train/tokenizer.py", "files of a start that was killed stay",
    "(folder / name).unlink(missing_ok=True)", "pass",
    f"{_KEPT}::test_killed_at_any_write_it_is_kept",
  ),
  Mutant(
    "caatnet/train/tokenizer.py", "a tokenizer is written over another",
    "path.read_text() != texts[main]", "False",
    f"{_KEPT}::test_another_tokenizer_is_not_written_over",
  ),
  Mutant(
    "caatnet/train/records.py", "runs older than a key lack it",
    'data.setdefault("tokenizer", "")', "pass",
    f"{_KEPT}::test_a_run_without_one_is_of_bytes",
  ),
  Mutant(
    "caatnet/train/loop.py", "any tokenizer goes on with a run",
    "    tokenizer.check(self.workdir, dataset.tokenizer)\n", "",
    f"{_KEPT}"
    "::test_a_folder_s_experiment_reads_by_the_tokenizer_kept_there",
  ),
  Mutant(
    "caatnet/build/experiments.py", "a folder's tokenizer is looked for again",
    "data = dataclasses.replace(data, kept=tokenizer.load(workdir))", "pass",
    f"{_KEPT}"
    "::test_a_folder_s_experiment_reads_by_the_tokenizer_kept_there",
  ),
]

_WEIGHTS = [
  Mutant(
    "caatnet/interop/layout.py", "repeated heads are not beside each other",
    "np.repeat(heads, part.repeats, axis=0)",
    "np.concatenate([heads] * part.repeats)",
    f"{_PUBLISHED}::test_any_ranks_compute_the_same",
  ),
  Mutant(
    "caatnet/interop/layout.py", "padding comes first",
    "[x, np.zeros((missing, *x.shape[1:]), x.dtype)]",
    "[np.zeros((missing, *x.shape[1:]), x.dtype), x]",
    f"{_PUBLISHED}::test_any_ranks_compute_the_same",
  ),
  Mutant(
    "caatnet/interop/layout.py", "keys and values change places",
    """      projection("k", *kv),
      projection("v", *kv),
""",
    """      projection("v", *kv),
      projection("k", *kv),
""",
    f"{_PUBLISHED}::test_a_family_computes_what_the_reference_does",
  ),
  Mutant(
    "caatnet/interop/layout.py", "repeated heads are merged though they differ",
    "(bits != bits[:, :1]).any()", "False",
    f"{_PUBLISHED}::test_repeated_heads_that_differ_are_not_merged",
  ),
  Mutant(
    "caatnet/interop/families.py", "null is a window of the default size",
    'if fields.get("sliding_window", 4096) is None:', "if False:",
    f"{_WRONG}::test_which_layers_have_a_window",
  ),
  Mutant(
    "caatnet/interop/families.py", "the old form of rotary bases is not read",
    'base = inner.number("rope_theta", base)',
    'base = inner.number("rope_theta", 10_000.0)',
    f"{_PUBLISHED}::test_a_family_computes_what_the_reference_does",
  ),
  Mutant(
    "caatnet/interop/source.py", "what is missing is found later",
    "if missing := expected.keys() - found.keys():", "if missing := set():",
    f"{_WRONG}::test_all_that_is_wrong_is_in_one_error",
  ),
  Mutant(
    "caatnet/interop/source.py", "a head unlike a tied table is lost",
    "if not _are_equal(found, HEAD, TABLE):", "if False:",
    f"{_WRONG}::test_a_tied_head_that_differs",
  ),
  Mutant(
    "caatnet/interop/source.py", "any tokenizer comes with the weights",
    "tokenizer.vocab_size > vocab_size", "False",
    f"{_PUBLISHED}::test_the_tokenizer_goes_with_the_weights",
  ),
  Mutant(
    "caatnet/interop/tensors.py", "the last of two tensors of a name is taken",
    "if count > 1", "if count > 2",
    f"{_WRONG}::test_a_header_that_lies",
  ),
  Mutant(
    "caatnet/interop/tensors.py", "an index leads out of its folder",
    "pathlib.Path(shard).name != shard or not path.is_file()",
    "not path.is_file()",
    f"{_WRONG}::test_an_index_that_lies",
  ),
  Mutant(
    "launch/benchmarks/engine.py", "a step that reads prompts is timed",
    "marks[1]) / (len(marks) - 2)", "marks[0]) / (len(marks) - 1)",
    "tests/launch/engine_test.py",
  ),
  Mutant(
    "launch/convert.py", "a context may be longer than published",
    "min(part[key], published.num_positions)", "part[key]",
    "tests/launch/convert_test.py",
  ),
  Mutant(
    "caatnet/interop/huggingface.py", "private channels are published",
    "if model.tensor.size > 1 and p < 1:", "if p < 0:",
    f"{_PUBLISHED}::test_one_rank_s_private_channels_are_the_dense_model_s",
  ),
  Mutant(
    "caatnet/interop/huggingface.py", "a worker stands for any run",
    'experiment.config["outer"]["algorithm"] != "data_parallel"', "False",
    f"{_PUBLISHED}::test_a_run_of_ours_is_published_and_read_again",
  ),
  Mutant(
    "caatnet/train/slices.py", "rows of a chunk are read again",
    "for start in range(0, self.shape[dim], step):",
    "for start in range(0, self.shape[dim]):",
    f"{_PUBLISHED}"
    "::test_a_checkpoint_in_slices_is_read_by_rows_and_places",
  ),
  Mutant(
    "caatnet/train/slices.py", "a stored chunk is the whole array",
    "local_shape=value.chunk", "local_shape=value.shape",
    f"{_PUBLISHED}::test_memory_holds_a_small_part_of_the_model",
  ),
  Mutant(
    "caatnet/train/files.py", "what a killed process left stays",
    "shutil.rmtree(left) if left.is_dir() else left.unlink()", "pass",
    f"{_PUBLISHED}::test_a_run_has_its_name_when_it_is_whole",
  ),
  Mutant(
    "caatnet/train/start.py", "another model's parameters are a start",
    "    if there != here\n", "    if False\n",
    f"{_START}::test_what_does_not_fit_is_named",
  ),
  Mutant(
    "caatnet/train/start.py", "another tokenizer's parameters are a start",
    "if other and other.identity != tokens.identity:", "if False:",
    f"{_START}::test_another_tokenizer_s_parameters_are_refused",
  ),
  Mutant(
    "caatnet/train/state.py", "a run starts from the last worker's parameters",
    "params = jax.tree.map(lambda x: x[0], start)",
    "params = jax.tree.map(lambda x: x[-1], start)",
    f"{_START}::test_at_another_p_all_workers_have_the_same_parameters",
  ),
  Mutant(
    "caatnet/train/records.py", "the start of a killed run is told twice",
    'if first_step and record["step"] <= first_step',
    'if record["step"] <= first_step',
    f"{_START}::test_steps_before_the_first_checkpoint_are_made_again",
  ),
  Mutant(
    "caatnet/train/loop.py", "a run forgets where it started from",
    'self.started_from = read_environment(self.workdir).get("started_from")',
    "self.started_from = None",
    f"{_START}::test_a_run_that_has_begun_needs_the_other_no_more",
  ),
]

_PODS = [
  Mutant(
    "parallel/hardware/collective_times.py",
    "a message larger than all that were measured takes as long as the last",
    "if size_bytes > self.sizes[-1]:", "if size_bytes < 0:",
    "tests/parallel/hardware_test.py::"
    "test_times_between_sizes_and_beyond_them",
  ),
  Mutant(
    "parallel/hardware/collective_times.py",
    "the fastest of small messages stands for large ones",
    "if t <= fast[0][1]:", "if t >= fast[0][1]:",
    "tests/parallel/hardware_test.py::test_a_sample_holds_what_was_measured",
  ),
  Mutant(
    "parallel/hardware/collective_times.py", "no dim of a torus is closed",
    "farthest += size // 2 if closed else size - 1", "farthest += size - 1",
    "tests/parallel/hardware_test.py::"
    "test_hops_of_a_torus_are_those_of_its_graph",
  ),
  Mutant(
    "parallel/hardware/collective_times.py",
    "a ring of eight has the steps of four",
    "steps = (n - 1) / 3", "steps = 1",
    "tests/parallel/hardware_test.py::test_what_follows_for_other_links",
  ),
  Mutant(
    f"{_INFERENCE}.py", "an MLP without a gate", "2 * width * ffn)",
    "width * ffn)",
    f"{_INFERENCE_TEST}::test_weights_are_the_published_parameters",
  ),
  Mutant(
    f"{_INFERENCE}.py", "all tokens of a prompt see all of it",
    "range(step.context - step.tokens + 1, step.context + 1)",
    "[step.context] * step.tokens",
    f"{_INFERENCE_TEST}::test_a_prompt_s_products_are_those_of_its_tokens",
  ),
  Mutant(
    f"{_INFERENCE}.py", "p shares the embedding, too",
    "channels = [model.width, *", "channels = [int(shares[0] * model.width), *",
    f"{_INFERENCE_TEST}::test_p_sends_its_share_exactly",
  ),
  Mutant(
    f"{_INFERENCE}.py", "latency takes the place of bytes",
    "return Span(*(max(wire, s) for s in self.times.all_reduce(size_bytes)))",
    "return Span(*self.times.all_reduce(1))",
    f"{_INFERENCE_TEST}::"
    "test_latency_only_adds_and_less_to_send_never_takes_longer",
  ),
  Mutant(
    "caatnet/models/transformer/communication.py",
    "in inference a door sends all channels",
    'count[Reduction("forward", dtype, (tokens, k), _kind(sync))] += 1',
    'count[Reduction("forward", dtype, (tokens, config.width), _kind(sync))] '
    "+= 1",
    f"{_STUDIES}/decoding_test.py::"
    "test_the_lowered_step_sends_what_the_formula_says",
  ),
  Mutant(
    "caatnet/studies/compilation/decoding.py", "a copied cache passes",
    "  if uses.faults:", "  if uses.faults and not uses.gathers:",
    f"{_STUDIES}/decoding_test.py::"
    "test_a_copied_cache_is_an_error_that_names_the_instruction",
  ),
  Mutant(
    "caatnet/studies/compilation/decoding.py",
    "a program that gathers pages has bounds",
    "gathers = bool(uses.gathers) or not uses.kernels", "gathers = False",
    f"{_STUDIES}/decoding_test.py::test_a_compiled_step",
  ),
  Mutant(
    "caatnet/studies/inference/study.py",
    "a help is one even if more sequences take it back",
    "while place and values[place - 1] >= threshold:",
    "while place and max(values[:place]) >= threshold:",
    f"{_STUDIES}/inference_test.py::test_a_help_is_one_from_there_on",
  ),
  Mutant(
    "caatnet/studies/inference/study.py", "every n-th layer is left out",
    "if i % every == 0 else 0.0", "if (i + 1) % every else 0.0",
    f"{_STUDIES}/inference_test.py::"
    "test_sharing_everything_saves_nothing_and_less_saves_more",
  ),
  Mutant(
    "parallel/xla/in_place.py", "one layer of a cache is no slice of it",
    "instruction.shapes[0].elements * parts >= source.elements",
    "instruction.shapes[0].elements >= source.elements",
    f"{_XLA}/in_place_test.py::test_copies_and_slices_are_named",
  ),
  Mutant(
    "parallel/xla/in_place.py", "an argument that is not donated is in place",
    'if i.opcode == "parameter" and int(i.literal) in module.aliased',
    'if i.opcode == "parameter"',
    f"{_XLA}/in_place_test.py::"
    "test_an_array_that_is_not_donated_is_written_anew",
  ),
  Mutant(
    "parallel/xla/in_place.py", "a copy inside a fusion is not seen",
    'if root.opcode not in _UPDATES | {"parameter"}',
    "if root.opcode not in _UPDATES | _KEEPS_SIZE",
    f"{_XLA}/in_place_test.py::test_a_cpu_widens_16_bits_to_write_a_row",
  ),
  Mutant(
    "parallel/xla/roofline.py", "a scatter moves the array that it writes into",
    '"scatter": 2}', '"scatter": 0}',
    f"{_XLA}/overlap_test.py::"
    "test_rows_written_in_place_count_themselves_and_not_the_whole",
  ),
  Mutant(
    "parallel/xla/roofline.py", "a nested fusion hands on what it never read",
    "  if value.root:  # a nested", "  if not value.name:  # a nested",
    f"{_XLA}/overlap_test.py::"
    "test_a_slice_in_a_nested_fusion_counts_what_is_sliced",
  ),
  Mutant(
    "parallel/xla/roofline.py", "a kernel reads an array once per operand",
    "for n in dict.fromkeys(kernel.operands)]", "for n in kernel.operands]",
    f"{_XLA}/overlap_test.py::test_a_kernel_counts_what_it_is_said_to_read",
  ),
  Mutant(
    "parallel/xla/latency.py", "an all-gather takes as long as one part of it",
    'entry.group_size if entry.kind == "all_gather" else 1',
    'entry.group_size if entry.kind == "all_to_all" else 1',
    f"{_XLA}/overlap_test.py::test_latency_of_a_node_is_what_was_measured",
  ),
]

_SERVING = "tests/caatnet/serving"
_SWITCHING = "tests/caatnet/studies/switching_test.py"
_ALONE = (
  f"{_SERVING}/scheduler_test.py::test_everyone_gets_what_a_run_alone_gives"
)
_SAME = (
  f"{_SERVING}/scheduler_test.py::test_what_is_compiled_decides_as_the_reference"
)
_BOTH_LISTS = (
  f"{_SERVING}/pages_test.py::"
  "test_compiled_lists_hand_out_what_the_reference_does"
)
_NEARLY = (
  f"{_SERVING}/pages_test.py::test_names_that_nearly_agree_are_told_apart"
)
_CLIENTS = f"{_SERVING}/server_clients_test.py"
_GROWTH = (
  f"{_SERVING}/server_growth_test.py::test_nothing_grows_with_what_was_served"
)
_SERVING_ROWS = [
  Mutant(
    "caatnet/serving/page_lists.py", "a page is free while a copy reads it",
    "      elif page in readers:\n        self._leaving[page] = None\n", "",
    f"{_SERVING}/pages_test.py::test_a_page_that_is_read_is_not_handed_out",
  ),
  Mutant(
    "caatnet/serving/page_lists.py", "the page that was given up last is taken",
    "pages = list(itertools.islice(self._idle, count))",
    "pages = list(reversed(self._idle))[:count]",
    f"{_SERVING}/pages_test.py::test_leaves_are_taken_first",
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "a page is free while a copy reads it",
    "    elif book.readers[page]:\n      _append(book, LEAVING, page)\n", "",
    f"{_SERVING}/pages_test.py::test_a_page_that_is_read_is_not_handed_out",
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "a prefix is taken before its leaves",
    "for i in range(count - 1, -1, -1):", "for i in range(count):", _BOTH_LISTS,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "buddies do not merge",
    "and book.where[buddy] == GROUPS + k:", "and False:", _BOTH_LISTS,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "an evicted page keeps its name",
    "    if book.named[page]:\n", "    if False:\n", _BOTH_LISTS,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "pages without a name are published",
    "  assert len(names) == 2 * len(pages)\n", "",
    f"{_SERVING}/pages_test.py::"
    "test_each_page_that_is_published_has_a_name",
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "pages that leave count as idle",
    "count += where[page] == IDLE", "count += where[page] > 0", _SAME,
  ),
  Mutant(
    "caatnet/serving/compiled_running.py", "kept tokens do not begin again",
    "at = step % len(times)", "at = min(step, len(times) - 1)",
    f"{_SERVING}/scheduler_test.py::"
    "test_answers_longer_than_what_is_kept_are_whole",
  ),
  Mutant(
    "caatnet/serving/compiled_running.py", "a chunk's token has no epoch",
    "drawn[1, i] = slot, self.epochs[slot]", "drawn[1, i] = slot, 0", _SAME,
  ),
  Mutant(
    "caatnet/serving/prefixes.py", "clients can foresee names",
    ", salt=os.urandom(16))", ")",
    f"{_SERVING}/pages_test.py::test_names_are_not_to_be_foreseen",
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "names are told apart by 64 bits",
    " and table[2, page] == second", "", _NEARLY,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "a gap hides who stands behind it",
    "table[0, gap], gap = table[0, place], place", "pass", _NEARLY,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "who is at home is moved",
    "if (place - home) & mask >= (place - gap) & mask:", "if True:", _NEARLY,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "a page gets a second name",
    "    if not named[page]:\n", "    if True:\n", _NEARLY,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "some grow though not all can",
    "  if needed > book.lengths[0] + book.lengths[IDLE]:", "  if needed < 0:",
    _BOTH_LISTS,
  ),
  Mutant(
    "caatnet/serving/compiled_pages.py", "a sequence gets more than it needs",
    "last = first + min(-(-longest[slot] // size) - first, most)",
    "last = first + most", _BOTH_LISTS,
  ),
  Mutant(
    "caatnet/serving/compiled_running.py", "who is read whole decodes",
    "if computed[slot] < context[slot]:", "if computed[slot] <= context[slot]:",
    _SAME,
  ),
  Mutant(
    "caatnet/serving/compiled_running.py", "only one token ends a sequence",
    "for k in range(len(stops)):", "for k in range(len(stops[:1])):", _ALONE,
  ),
  Mutant(
    "caatnet/serving/running.py", "a slot keeps what ended the one before",
    "    self._stops[:, slot] = _NONE\n", "", _ALONE,
  ),
  Mutant(
    "caatnet/serving/groups.py", "buddies do not merge",
    "      while page ^ size in free[k]:", "      while False:",
    f"{_SERVING}/pages_test.py::"
    "test_groups_hand_out_each_page_once_and_merge",
  ),
  Mutant(
    "caatnet/serving/requests.py", "a page's name forgets what is before it",
    "self.names[-prefixes.SIZE :] or prefixes.ROOT", "prefixes.ROOT",
    f"{_SERVING}/pages_test.py::test_found_pages_are_those_of_a_trie",
  ),
  Mutant(
    "caatnet/serving/host.py", "a last page that has grown is not copied again",
    "return valid // self.page_size, -(",
    "return -(-valid // self.page_size), -(",
    f"{_SERVING}/scheduler_test.py::test_copies_move_what_the_host_has_not",
  ),
  Mutant(
    "caatnet/serving/swapping.py", "another prompt goes on with a turn's copy",
    "if owner in self._turns or not self.host.begins(owner, request.prompt):",
    "if owner in self._turns:", _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "the dearer way is taken",
    "swap < recompute", "swap > recompute",
    f"{_SERVING}/scheduler_test.py::test_the_cheaper_way_is_taken",
  ),
  Mutant(
    "caatnet/serving/running.py", "the first of those who run gives way",
    "values == values.max()", "values == values.min()",
    f"{_SERVING}/scheduler_test.py::test_everyone_gets_what_a_run_alone_gives",
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "who runs keeps the priority it came with",
    "    if request.slot >= 0:\n      self.running.priority",
    "    if False:\n      self.running.priority",
    _ALONE,
  ),
  Mutant(
    "caatnet/serving/running.py", "rows are moved too late for seldom looks",
    "self._steps - _KEPT + looks", "self._steps - _KEPT",
    f"{_SERVING}/scheduler_test.py::"
    "test_answers_longer_than_what_is_kept_are_whole",
  ),
  Mutant(
    "parallel/hardware/devices.py", "GPUs have the memory of TPUs' compiler",
    "if self.num_links > 1 else", "if self.num_links > 0 else",
    "tests/parallel/planner/memory_fit_test.py::"
    "test_the_planner_has_the_fit_of_what_was_compiled",
  ),
  Mutant(
    "caatnet/serving/running.py", "a late token is forgotten",
    "max(0, int(pending))", "0",
    f"{_SERVING}/scheduler_test.py::test_everyone_gets_what_a_run_alone_gives",
  ),
  Mutant(
    "caatnet/serving/policies/vtc.py", "a client who comes back is not lifted",
    "= max(own, least)", "= own",
    f"{_SERVING}/policies_test.py::"
    "test_a_client_who_comes_back_has_saved_nothing",
  ),
  Mutant(
    "caatnet/serving/policies/vtc.py", "weights do not count",
    "cost * count / weight", "cost * count",
    f"{_SERVING}/policies_test.py::test_weights_divide_service",
  ),
  Mutant(
    "caatnet/serving/swapping.py", "no copy is worth waiting for",
    "return self._copy_s(kind, pages) <= self._limits.wait_s", "return False",
    _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "a copy is dropped while it is written",
    "    self.host.pin(request.owner)  # as long as it is being written\n", "",
    _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "the next turn unpins what is written",
    "      if not self._busy[request.owner]:\n        self.host.unpin",
    "      if True:\n        self.host.unpin", _ALONE,
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "nobody begins if all have given way",
    "if self._short and not self.limits.admit_while_short:", "if False:",
    _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "a turn cancelled as it leaves stays pinned",
    "      if request.state in ENDS:\n        self.drop(request)\n      return",
    "      if request.state in ENDS and not request.more:\n"
    "        self.drop(request)\n      return", _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "cancelled on the way back, it keeps pages",
    "      if len(request.pages):  # it was", "      if False:  # it was",
    _ALONE,
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "a token after the end counts",
    "    if request.state not in ENDS:  # else it ended a step before\n",
    "    if True:\n", _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "turns are not kept",
    "keep = ended and request.more and self._limits.keep_turns",
    "keep = False", _ALONE,
  ),
  Mutant(
    "caatnet/serving/swapping.py", "a page that ends a prompt is read again",
    "if self._limits.copy_on_write else NO_PAGES", "if False else NO_PAGES",
    f"{_SERVING}/scheduler_test.py::"
    "test_a_prompt_that_ends_with_its_page_is_not_read_again",
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "nobody's deadline passes",
    "while self._deadlines and self._deadlines[0][0] <= now:", "while False:",
    _ALONE,
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "who is preempted stays in the step",
    "alive = self.running.epochs[decodes] == epochs",
    "alive = np.ones(len(decodes), bool)", _ALONE,
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "a long chunk takes short ones along",
    "len(chunks) < count and longest <= length", "len(chunks) < count", _ALONE,
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "a step has one chunk",
    "len(chunks) < count and longest <= length", "not chunks",
    f"{_SERVING}/scheduler_test.py::"
    "test_short_prompts_are_read_in_one_step_and_long_ones_apart",
  ),
  Mutant(
    "caatnet/serving/calibration.py", "a chunk may be longer than the context",
    "min(capacity.chunk, capacity.context)", "capacity.chunk",
    f"{_SERVING}/warm_up_test.py::"
    "test_copies_within_are_compiled_where_nothing_else_is_copied",
  ),
  Mutant(
    "caatnet/serving/calibration.py", "copies within are not compiled",
    "  jobs.append(lambda: _await", "  str(lambda: _await",
    f"{_SERVING}/warm_up_test.py::"
    "test_copies_within_are_compiled_where_nothing_else_is_copied",
  ),
  Mutant(
    "caatnet/inference/buckets.py", "short chunks have more tokens than one",
    "found.append((count, chunk // count))", "found.append((count, chunk))",
    f"{_SERVING}/warm_up_test.py::"
    "test_all_that_a_step_may_have_is_a_size_that_is_compiled",
  ),
  Mutant(
    "caatnet/serving/running.py", "many stop tokens are none",
    "self._asked[slot] = request.is_end", "pass", _ALONE,
  ),
  Mutant(
    "caatnet/serving/warm_up.py", "short chunks have no program of their own",
    "for length in _sizes(\n"
    "      buckets.MIN_CHUNK, bucket(most, *factors), buckets.CHUNK_FACTOR\n"
    "    )\n", "for length in [bucket(most, *factors)]\n",
    f"{_SERVING}/warm_up_test.py::"
    "test_all_that_a_step_may_have_is_a_size_that_is_compiled",
  ),
  Mutant(
    "caatnet/serving/warm_up.py", "several chunks have no program",
    "    (count, length)\n", "    (1, length)\n",
    f"{_SERVING}/warm_up_test.py::"
    "test_all_that_a_step_may_have_is_a_size_that_is_compiled",
  ),
  Mutant(
    "caatnet/serving/policies/dlpm.py", "the longest prefix is always first",
    "if deficits[c] > 0]", "]",
    f"{_SERVING}/policies_test.py::"
    "test_who_shares_no_prefix_waits_for_a_quantum_at_most",
  ),
  Mutant(
    "caatnet/serving/policies/dlpm.py", "a quantum has no weight",
    "self._quantum * line[0][2].weight", "self._quantum",
    f"{_SERVING}/policies_test.py::"
    "test_who_shares_no_prefix_waits_for_a_quantum_at_most",
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "a sequence of NaN is served on",
    "in map(step.request, event.failed):", "in []:",
    f"{_SERVING}/server_clients_test.py::test_a_sequence_of_nan_fails_alone",
  ),
  Mutant(
    "caatnet/serving/warm_up.py", "long contexts compile while they wait",
    "_sizes(least, most_pages, 2)", "[least]",
    f"{_SERVING}/warm_up_test.py::test_nothing_is_compiled_while_it_serves",
  ),
  Mutant(
    "caatnet/serving/calibration.py", "long copies compile while they wait",
    "for k in range(longest))", "for k in range(1))",
    f"{_SERVING}/warm_up_test.py::test_nothing_is_compiled_while_it_serves",
  ),
  Mutant(
    "caatnet/serving/running.py", "who leaves stays in the order of slots",
    "    self._order[at:last] = self._order[at + 1 : self._len]\n", "", _ALONE,
  ),
  Mutant(
    "caatnet/serving/server/service.py", "who comes too late is not told",
    "(State.FINISHED, State.CANCELLED)",
    "(State.FINISHED, State.CANCELLED, State.EXPIRED)",
    f"{_SERVING}/server_api_test.py::test_what_is_wrong_is_named",
  ),
  Mutant(
    "parallel/planner/memory.py", "several microbatches need no other copy",
    'state.gradients * (c.microbatches > 1)', "0.0",
    "tests/parallel/planner/memory_fit_test.py::"
    "test_the_planner_has_the_fit_of_what_was_compiled",
  ),
  Mutant(
    "caatnet/serving/scheduler.py", "who has no page for its token decodes",
    "      alive[without] = False\n", "", _ALONE,
  ),
  Mutant(
    "caatnet/serving/groups.py", "a run goes on where pages are taken",
    "self._is_free.find(0, start, start + count)", "-1",
    f"{_SERVING}/pages_test.py::"
    "test_groups_hand_out_each_page_once_and_merge",
  ),
  Mutant(
    "caatnet/serving/running.py", "tokens of long answers are written over",
    "for slot in np.flatnonzero(oldest).tolist():", "for slot in ():",
    f"{_SERVING}/scheduler_test.py::"
    "test_answers_longer_than_what_is_kept_are_whole",
  ),
  Mutant(
    "caatnet/serving/server/service.py", "who has gone is served on",
    "      self._do(lambda: self._cancel(left))", "      pass",
    f"{_CLIENTS}::test_who_has_gone_before_the_end_is_cancelled",
  ),
  Mutant(
    "caatnet/serving/server/replies.py", "nobody listens whether clients go",
    "    self._call.leave()", "    pass",
    f"{_CLIENTS}::test_who_has_gone_before_the_end_is_cancelled",
  ),
  Mutant(
    "caatnet/serving/server/http.py", "a head may take for ever",
    "self._reading = self.loop.call_later(read_s, transport.close)", "pass",
    f"{_CLIENTS}::test_slow_and_malformed_clients_are_let_go",
  ),
  Mutant(
    "caatnet/serving/server/api.py", "all answers have one seed",
    "index, i, prompt, seed + index)", "index, i, prompt, seed)",
    f"{_SERVING}/server_api_test.py::"
    "test_several_prompts_with_several_answers_each",
  ),
  Mutant(
    "caatnet/serving/running.py", "clients are numbered for ever",
    "        self._forget_clients()", "        pass",
    f"{_GROWTH}[first_come]",
  ),
  Mutant(
    "caatnet/serving/policies/clients.py", "clients are remembered for ever",
    "if len(self._served) > _REMEMBERED + len(self._present):", "if False:",
    f"{_GROWTH}[vtc]",
  ),
  Mutant(
    "caatnet/serving/swapping.py", "owners of copies are remembered for ever",
    "    if not self._busy[owner]:\n      del self._busy[owner]\n", "",
    f"{_GROWTH}[first_come]",
  ),
  Mutant(
    "caatnet/serving/traces.py", "each turn has a text of its own",
    "kind, name = 1, arrival.conversation", "pass",
    f"{_SERVING}/traces_test.py::test_a_turn_begins_with_the_turns_before_it",
  ),
  Mutant(
    "caatnet/serving/traces.py", "batches are bursts",
    "offsets = np.sort(rng.uniform(0, _BATCH_S, len(members))).tolist()",
    "offsets = [0.0] * len(members)",
    f"{_SERVING}/traces_test.py::test_batches_are_spread_in_their_order",
  ),
  Mutant(
    "caatnet/serving/host.py", "a copy that is not kept stays",
    "      if not self._keep:\n        self.drop(owner)\n", "",
    f"{_SWITCHING}::test_bytes_with_reuse_are_fewer_on_one_schedule",
  ),
  Mutant(
    "caatnet/serving/simulator.py", "single pages cost a call for their run",
    "runs = num_pages if self.single else num_runs", "runs = num_runs",
    f"{_SWITCHING}::test_a_page_alone_costs_a_call_for_each_range",
  ),
  Mutant(
    "caatnet/studies/serving/tails.py", "the bootstrap draws single gaps",
    "owners = np.repeat(np.arange(len(groups)), [len(g) for g in groups])",
    "owners = np.arange(len(pooled)) % len(groups)",
    f"{_SWITCHING}::test_percentiles_and_their_interval",
  ),
  Mutant(
    "caatnet/studies/serving/server.py", "time passes without those who come",
    "present = len(scheduler.requests)", "present = len(scheduler.running)",
    f"{_SWITCHING}::test_little_s_law_holds_exactly",
  ),
  Mutant(
    "caatnet/studies/serving/fairness.py", "windows begin with the run",
    "float(part.max() - part.min())", "float(abs(part).max())",
    f"{_SWITCHING}::test_difference_is_that_of_the_worst_window",
  ),
  Mutant(
    "caatnet/studies/serving/vllm_log.py", "pages are found nowhere",
    'server["pages"] - _NULL_PAGES, server["page_size"], server["reuse"],',
    'server["pages"] - _NULL_PAGES, server["page_size"], False,',
    "tests/caatnet/studies/serving_test.py::test_the_log_comes_out",
  ),
  Mutant(
    "caatnet/studies/serving/measured.py", "no prompts begin alike",
    "found[i][:count] = found[like][:count]", "del count, like",
    "tests/caatnet/studies/serving_test.py::test_the_log_comes_out",
  ),
]

_ELASTIC = "tests/parallel/elastic"
_TRANSPORT = [
  Mutant(
    "parallel/elastic/collectives.py", "an owner adds its own part first",
    "      self._x[start:stop] if r == self._rank\n"
    "      else self._parts[self._row(r), start - begin : stop - begin]\n"
    "      for r in range(len(self.ranks))\n",
    "      self._x[start:stop] if r == self._rank\n"
    "      else self._parts[self._row(r), start - begin : stop - begin]\n"
    "      for r in np.roll(range(len(self.ranks)), -self._rank)\n",
    f"{_ELASTIC}/collectives_test.py::"
    "test_sums_are_their_stated_order_bit_for_bit[3]",
  ),
  Mutant(
    "parallel/elastic/collectives.py", "chunks have the remainder of n / M cut",
    "self._chunk = -(-x.size // len(ranks))",
    "self._chunk = max(1, x.size // len(ranks))",
    f"{_ELASTIC}/collectives_test.py::"
    "test_sums_are_their_stated_order_bit_for_bit[3]",
  ),
  Mutant(
    "parallel/elastic/collectives.py", "a ring's sum begins at its owner",
    "first = (me + 1) % n", "first = me",
    f"{_ELASTIC}/collectives_test.py::"
    "test_a_ring_adds_as_the_executor_on_a_mesh",
  ),
  Mutant(
    "parallel/elastic/links.py", "who was early is not known to have spoken",
    "      operation.heard.update(early)\n", "",
    f"{_ELASTIC}/collectives_test.py::test_a_tag_is_used_again_at_once",
  ),
  Mutant(
    "parallel/elastic/operations.py", "what failed is booked as done",
    "self._links.end(self, self._sent, self._received, False)",
    "self._links.end(self, self._sent, self._received, True)",
    f"{_ELASTIC}/collectives_test.py::"
    "test_what_a_failed_try_has_sent_is_booked_apart",
  ),
  Mutant(
    "parallel/elastic/operations.py", "blocks come before there is a place",
    "    if peer in self.ready:\n      self._links.send",
    "    if True:\n      self._links.send",
    f"{_ELASTIC}/collectives_test.py::"
    "test_an_operation_that_one_has_not_begun_blocks_no_other",
  ),
  Mutant(
    "parallel/elastic/links.py", "who is lost is not said to the others",
    "culprit = (error.peer or self.me).encode()",
    "culprit = self.me.encode()",
    f"{_ELASTIC}/attacks_test.py::"
    "test_a_member_that_sends_what_is_wrong_is_named",
  ),
  Mutant(
    "parallel/elastic/frames.py", "a header's checksum is not looked at",
    "  if _CRC.unpack_from(view, _FIELDS.size)[0] != zlib.crc32(\n"
    "    view[: _FIELDS.size]\n  ):",
    "  if False:",
    f"{_ELASTIC}/attacks_test.py::test_fuzzed_frames_raise_one_error",
  ),
  Mutant(
    "parallel/elastic/frames.py", "a payload's checksum is not looked at",
    "header.crc is not None and header.crc != zlib.crc32(payload)", "False",
    f"{_ELASTIC}/attacks_test.py::"
    "test_a_member_that_sends_what_is_wrong_is_named",
  ),
  Mutant(
    "parallel/elastic/frames.py", "any length is believed",
    "if length > LIMITS[kind]:", "if False:",
    f"{_ELASTIC}/attacks_test.py::test_fuzzed_frames_raise_one_error",
  ),
  Mutant(
    "parallel/elastic/listener.py", "a dialer's token is not looked at",
    "    if not hmac.compare_digest(\n"
    "      mac, self._security.mac(b\"dialer\", opening, said)\n    ):",
    "    if False:",
    f"{_ELASTIC}/attacks_test.py::"
    "test_a_handshake_that_was_recorded_is_of_no_use",
  ),
  Mutant(
    "parallel/elastic/listener.py", "the same nonce for everybody",
    "OPENING.pack(MAGIC, os.urandom(NONCE_BYTES))",
    "OPENING.pack(MAGIC, bytes(NONCE_BYTES))",
    f"{_ELASTIC}/attacks_test.py::"
    "test_a_handshake_that_was_recorded_is_of_no_use",
  ),
  Mutant(
    "parallel/elastic/listener.py", "a connection of an old epoch is taken",
    "if request.epoch < offer.epoch:", "if False:",
    f"{_ELASTIC}/attacks_test.py::"
    "test_a_connection_of_another_epoch_is_refused",
  ),
  Mutant(
    "parallel/elastic/fetch.py", "a chunk is believed without its hash",
    "if hashlib.sha256(view).digest() != wanted:", "if False:",
    f"{_ELASTIC}/state_test.py::"
    "test_a_holder_that_is_wrong_is_dropped_and_named",
  ),
  Mutant(
    "parallel/elastic/fetch.py", "a manifest is believed without its digest",
    "if hashlib.sha256(data).hexdigest() != self._digest:", "if False:",
    f"{_ELASTIC}/state_test.py::"
    "test_a_manifest_of_another_content_is_not_believed",
  ),
  Mutant(
    "parallel/elastic/leases.py", "samples of who left are lost",
    "      for s in spans),\n  ]", "      for s in ()),\n  ]",
    f"{_ELASTIC}/state_test.py::"
    "test_no_sample_is_counted_twice_and_none_is_lost",
  ),
  Mutant(
    "parallel/elastic/leases.py", "newcomers of two epochs draw the same",
    "since * MOST_ITEMS + members.index(me)",
    "members.index(me)",
    f"{_ELASTIC}/state_test.py::"
    "test_no_sample_is_counted_twice_and_none_is_lost",
  ),
]

_SWARM = f"{_TRAIN}/swarm_test.py"
_APART = "tests/parallel/outer/apart_test.py"
_COMING = "tests/parallel/outer/eager_test.py"
_LATE = f"{_TRAIN}/late_test.py"
_SWARMS = [
  Mutant(
    "parallel/outer/apart.py", "every worker has the first rank",
    "np.int32(exchange.rank)", "np.int32(0)",
    f"{_APART}::test_stages_over_sockets_have_the_bits_of_one_program",
  ),
  Mutant(
    "parallel/outer/apart.py", "weights are left alone",
    "if len(set(weights)) == 1:", "if True:",
    f"{_APART}::test_stages_over_sockets_have_the_bits_of_one_program",
  ),
  Mutant(
    "parallel/outer/base.py", "a late part pulls the others back",
    "lambda x, new, old: x + (new - old)", "lambda x, new, old: x",
    f"{_SWARM}::test_a_late_part_is_moved_by_what_the_others_have_done",
  ),
  Mutant(
    "caatnet/train/peer.py", "who comes has drawn parameters",
    "if newcomer:", "if newcomer and number < 0:",
    f"{_SWARM}::test_who_comes_starts_from_what_is_shared_and_no_sample_"
    "counts_twice",
  ),
  Mutant(
    "parallel/outer/dc_s3gd.py", "a late worker's old update counts twice",
    "if said == \"begin\":", "if True:",
    f"{_SWARM}::test_a_late_update_is_told_in_place_of_the_one_before",
  ),
  Mutant(
    "parallel/outer/streaming.py", "a fragment that was sent is sent again",
    "min(first, last + 1 - tau)", "first + 1 - tau",
    f"{_LATE}::test_what_a_late_worker_has_sent_is_merged_and_the_rest_waits"
    "[1-0.25]",
  ),
  Mutant(
    "parallel/outer/streaming.py", "who is late sends another fragment's piece",
    "zeros = jax.tree.map(jnp.zeros_like, workers[\"sending\"])",
    "zeros = workers[\"sending\"]",
    f"{_LATE}::test_what_a_late_worker_has_sent_is_merged_and_the_rest_waits"
    "[2-0.0]",
  ),
  Mutant(
    "caatnet/train/peer.py", "an update that is late for a finish is lost",
    "updates = jax.tree.map(jnp.subtract, params, common)",
    "updates = _zeros(params)",
    f"{_LATE}::test_an_update_that_is_late_for_a_finish_is_told_at_the_next_"
    "begin",
  ),
  Mutant(
    "caatnet/train/peer.py", "a late gradient takes the others back",
    "return args | state", "return state | args",
    f"{_SWARM}::test_a_late_gradient_counts_at_the_others_parameters",
  ),
  Mutant(
    "caatnet/train/apart.py", "who comes has drawn parameters of its own",
    "self._outer.started(found) if starts else found", "found",
    f"{_SWARM}::test_who_comes_starts_from_what_is_shared_and_no_sample_"
    "counts_twice[eager]",
  ),
  Mutant(
    "caatnet/train/apart.py", "inner optimizers of equal workers are own ones",
    "part |= {key: state[key] for key in _EQUAL}",
    "part |= {key: state[key] for key in _EQUAL[:1]}",
    f"{_SWARM}::test_who_comes_starts_from_what_is_shared_and_no_sample_"
    "counts_twice[data_parallel]",
  ),
  Mutant(
    "parallel/outer/eager.py", "the common trajectory is a mean ahead",
    "state[\"mean\"], state[\"optimizer\"], state[\"params\"]",
    "eager, state[\"optimizer\"], state[\"params\"]",
    f"{_COMING}::test_what_is_applied_telescopes_while_workers_come_and_go",
  ),
  Mutant(
    "parallel/outer/eager.py", "a late worker says again what it has said",
    "if (said, later) == (\"begin\", \"begin\"):", "if later == \"begin\":",
    f"{_COMING}::test_what_a_late_worker_has_left_unsaid_is_told_once",
  ),
  Mutant(
    "parallel/outer/eager.py", "a late worker forgets what it has trained",
    "if said == \"finish\":", "if False:",
    f"{_COMING}::test_what_a_late_worker_has_left_unsaid_is_told_once",
  ),
  Mutant(
    "caatnet/train/apart.py", "a step in which something arrives is forgotten",
    "yield Event(waiting, \"begin\", step + 1)",
    "yield Event(waiting, \"begin\", step + 2)",
    f"{_SWARM}::test_without_churn_a_swarm_has_the_bits_of_a_mesh",
  ),
  Mutant(
    "caatnet/train/apart.py", "what cannot be carried is found late",
    "for step in self._outer.steady_round:", "for step in ():",
    f"{_SWARM}::test_what_cannot_run_in_a_swarm_is_refused_first",
  ),
  Mutant(
    "caatnet/train/peer.py", "all parts weigh the same",
    "min(self._steps, every)", "every",
    f"{_SWARM}::test_a_part_weighs_the_examples_that_are_in_it",
  ),
  Mutant(
    "caatnet/train/swarming.py", "who is stopped says saved, and has not",
    "if last or self.peer.step", "if self.peer.step",
    f"{_SWARM}::test_a_stopped_worker_has_saved_the_round_that_was_under_way",
  ),
  Mutant(
    "parallel/elastic/patience.py", "who comes too late waits on",
    "if 0 < rounds <= message.revision:", "if False:",
    f"{_SWARM}::test_who_comes_after_the_last_round_ends_and_says_so",
  ),
  Mutant(
    "caatnet/train/together.py", "process 0 keeps to itself what was decided",
    "self._seen = _told(what)", "self._seen = _told(what) and self._seen",
    "tests/launch/processes_test.py::"
    "test_a_worker_of_two_processes_has_the_bits_of_the_others",
  ),
]

_HOSTS = [
  Mutant(
    "parallel/elastic/history.py", "a log that follows has no state",
    "self._write(state=_to_json(after), rules=self._rules, effects=())", "pass",
    f"{_ELASTIC}/history_test.py::"
    "test_a_long_log_is_followed_by_one_that_runs_by_itself",
  ),
  Mutant(
    "parallel/elastic/coordinator.py", "whose vote was wrong is back at once",
    "- state.wrong", "",
    f"{_ELASTIC}/search_test.py::"
    "test_whose_vote_was_wrong_comes_back_after_a_round_without_it",
  ),
  Mutant(
    "parallel/elastic/journal.py", "a damaged record is believed",
    'if line[: _CRC_CHARS + 1] != b"%08x " % crc:', "if not data:",
    f"{_ELASTIC}/journal_test.py::test_damage_is_refused_with_its_line",
  ),
  Mutant(
    "parallel/elastic/journal.py", "a torn line stays",
    "os.ftruncate(self._file, self._size)", "pass",
    f"{_ELASTIC}/journal_test.py::"
    "test_what_is_cut_off_anywhere_goes_on_with_the_last_whole_record",
  ),
  Mutant(
    "parallel/elastic/journal.py", "a journal is replaced by an empty one",
    "      _write(file, line)\n      os.replace(beside, self._path)\n",
    "      os.replace(beside, self._path)\n      _write(file, line)\n",
    f"{_ELASTIC}/journal_test.py::"
    "test_a_coordinator_killed_while_it_compacts_forgets_nothing",
  ),
  Mutant(
    "parallel/elastic/journal.py", "a new journal is not locked",
    "      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n      crc, line",
    "      crc, line",
    f"{_ELASTIC}/journal_test.py::"
    "test_a_long_journal_is_replaced_by_its_last_record",
  ),
  Mutant(
    "parallel/elastic/channel.py", "a half-open connection is kept",
    "if self._ends_silent and silent_s > self.silence_s:", "if False:",
    f"{_ELASTIC}/reported_test.py::test_a_half_open_connection_ends",
  ),
  Mutant(
    "parallel/elastic/handshake.py", "what is not acknowledged is waited for",
    "  if unheard_s:", "  if False:",
    f"{_ELASTIC}/reported_test.py::"
    "test_a_connection_over_which_nothing_arrives_ends_a_sum",
  ),
  Mutant(
    "parallel/elastic/fetch.py", "memory that has gone bad is taken",
    "if hashlib.sha256(copy).digest() != digest:", "if False:",
    f"{_ELASTIC}/refused_test.py::"
    "test_a_holder_that_has_not_what_its_hash_says_is_one_line",
  ),
  Mutant(
    "parallel/elastic/leases.py", "a new run's newcomers draw below 0",
    "since = 2 * since if since >= 0 else -2 * since - 1", "pass",
    f"{_ELASTIC}/state_test.py::"
    "test_newcomers_of_a_new_run_from_a_checkpoint_draw_apart",
  ),
  Mutant(
    "parallel/elastic/service.py", "who went with another is dropped again",
    "if peer not in self._watched:", "if False:",
    f"{_ELASTIC}/service_test.py::"
    "test_a_coordinator_goes_on_when_all_are_silent_at_once",
  ),
  Mutant(
    "parallel/elastic/service.py", "nonsense before a Hello leaves no line",
    "if isinstance(message, _Gone) and message.wrong:", "if False:",
    f"{_ELASTIC}/refused_test.py::"
    "test_who_has_the_token_and_sends_nonsense_is_one_line",
  ),
  Mutant(
    "parallel/elastic/listener.py", "any number of handshakes is under way",
    "if len(self._underway) > self._limits.handshakes:", "if False:",
    f"{_ELASTIC}/refused_test.py::"
    "test_a_thousand_connections_at_once_hold_nobody_up",
  ),
  Mutant(
    "parallel/elastic/listener.py", "any number of connections is taken",
    "if self._accepted >= self._limits.connections:", "if False:",
    f"{_ELASTIC}/attacks_test.py::"
    "test_connections_beyond_the_limit_are_refused_until_one_ends",
  ),
  Mutant(
    "parallel/elastic/service.py", "any number of peers is taken",
    "elif len(self._channels) >= self._most_peers:", "elif False:",
    f"{_ELASTIC}/service_test.py::test_more_peers_than_there_may_be_are_refused",
  ),
  Mutant(
    "parallel/elastic/bandwidth.py", "links are never measured again",
    "return ranks not in self._rings or self._slow >= _IN_A_ROW",
    "return ranks not in self._rings",
    f"{_ELASTIC}/bandwidth_test.py::test_a_ring_goes_round_a_slow_link_"
    "also_when_another_one_becomes_slow",
  ),
  Mutant(
    "parallel/elastic/exchange.py", "a ring is in the order of ranks",
    "ranks=self.ring if ring else self.contributors",
    "ranks=self.contributors",
    f"{_ELASTIC}/bandwidth_test.py::test_a_ring_goes_round_a_slow_link_"
    "also_when_another_one_becomes_slow",
  ),
  Mutant(
    "parallel/elastic/coordinator.py", "the grace of another epoch counts",
    "now = state.phase is Phase.OPEN and message == (\n"
    "      record.epoch, record.revision\n    )",
    "now = state.phase is Phase.OPEN",
    f"{_ELASTIC}/reported_test.py::"
    "test_stragglers_are_cut_off_also_after_a_member_died",
  ),
  Mutant(
    "parallel/elastic/coordinator.py", "a newcomer is believed to be a donor",
    "for peer, hello in state.pending if _holds(hello, record)}",
    "for peer, hello in state.pending}",
    f"{_ELASTIC}/reported_test.py::"
    "test_a_newcomer_with_a_higher_revision_does_not_become_the_donor",
  ),
  Mutant(
    "parallel/elastic/channel.py", "who does not read is kept",
    "if full:", "if full and not self._open:",
    f"{_ELASTIC}/service_test.py::"
    "test_who_does_not_read_loses_the_connection",
  ),
  Mutant(
    "parallel/elastic/exchange.py", "a mean is divided by the count",
    "total += np.float32(weight)", "total += np.float32(1)",
    f"{_ELASTIC}/swarm_test.py::test_rounds_are_those_of_numpy_bit_for_bit",
  ),
  Mutant(
    "parallel/elastic/leases.py", "only contributors are granted samples",
    "sorted(members - kept.keys())", "sorted(used)",
    f"{_ELASTIC}/state_test.py::"
    "test_a_slow_newcomer_draws_again_only_once",
  ),
  Mutant(
    "parallel/elastic/agent.py", "a round's result is shared before it counts",
    "        self._result = payload\n",
    "        self._result = payload\n        self._install(payload)\n",
    f"{_ELASTIC}/service_test.py::"
    "test_a_result_that_is_not_committed_is_not_the_state",
  ),
]

_PIPELINE_ROWS = [
  Mutant(
    "parallel/pipeline/builders.py", "cotangents come to the first chunk first",
    "chunk = size.chunks - 1 - action.chunk", "chunk = action.chunk",
    f"{_PIPELINE}/builders_test.py::test_orders_by_hand",
  ),
  Mutant(
    "parallel/pipeline/builders.py", "eager 1F1B warms up as 1F1B does",
    "return 2 * _waves(size, stage) + (size.chunks - 1) * size.stages",
    "return _waves(size, stage) + (size.chunks - 1) * size.stages",
    f"{_PIPELINE}/builders_test.py::test_stored_activations",
  ),
  Mutant(
    "parallel/pipeline/builders.py", "ZB-H1 puts no gradients of weights off",
    "_split(size, _waves(size, stage), delay=stage)",
    "_split(size, _waves(size, stage), delay=0)",
    f"{_PIPELINE}/builders_test.py::test_bubbles",
  ),
  Mutant(
    "parallel/pipeline/builders.py", "a fallback keeps the name that was asked",
    "timetable = BUILDERS[timetable].one_chunk or timetable",
    "timetable = timetable or BUILDERS[timetable].one_chunk",
    f"{_PIPELINE}/builders_test.py::test_with_one_chunk_there_are_other_names",
  ),
  Mutant(
    "parallel/pipeline/timetable.py", "what is made is there in the same tick",
    "        made += produced(action, part)",
    "        done |= dict.fromkeys(produced(action, part), 0); made.append(0)",
    f"{_PIPELINE}/builders_test.py::"
    "test_300_timetables_are_proven_and_cost_what_formulas_say",
  ),
  Mutant(
    "parallel/pipeline/check.py", "what is made in a tick is there in it",
    "& (ticks[kind] <= needed)", "& (ticks[kind] < needed)",
    f"{_PIPELINE}/check_test.py::test_a_proof_is_what_a_replay_says",
  ),
  Mutant(
    "parallel/pipeline/check.py", "cotangents come from the same part",
    "(Kind.BACKWARD, after, 1),", "(Kind.BACKWARD, forward, 1),",
    f"{_PIPELINE}/check_test.py::test_a_proof_is_what_a_replay_says",
  ),
  Mutant(
    "parallel/pipeline/check.py", "weights' gradients wait for nothing",
    "(Kind.WEIGHT, back, 0),", "(Kind.WEIGHT, forward, 0),",
    f"{_PIPELINE}/check_test.py::test_a_proof_is_what_a_replay_says",
  ),
  Mutant(
    "parallel/pipeline/check.py", "one more than the limit is stored",
    "over = kept > limits", "over = kept > limits + 1",
    f"{_PIPELINE}/check_test.py::test_what_was_changed_is_refused[a_limit_less]",
  ),
  Mutant(
    "parallel/pipeline/check.py", "half a backward is a backward",
    "needed[kind] = done[Kind.BACKWARD] | done[kind]",
    "needed[kind] = done[Kind.BACKWARD:].any(0)",
    f"{_PIPELINE}/check_test.py::test_what_was_changed_is_refused[dropped]",
  ),
  Mutant(
    "parallel/pipeline/cost.py", "activations go with the inputs' cotangents",
    "return np.maximum(ticks[Kind.BACKWARD], ticks[Kind.WEIGHT])",
    "return np.maximum(ticks[Kind.BACKWARD], ticks[Kind.INPUT])",
    f"{_PIPELINE}/builders_test.py::test_stored_activations",
  ),
  Mutant(
    "parallel/pipeline/cost.py", "a stage sends to itself",
    "return forward & apart, backward & apart", "return forward, backward",
    f"{_PIPELINE}/builders_test.py::"
    "test_300_timetables_are_proven_and_cost_what_formulas_say",
  ),
  Mutant(
    "parallel/pipeline/cost.py", "an input is there as soon as it is made",
    "comes = np.concatenate([forward[:1], forward[:-1] + 1])",
    "comes = np.concatenate([forward[:1], forward[:-1]])",
    f"{_PIPELINE}/builders_test.py::"
    "test_300_timetables_are_proven_and_cost_what_formulas_say",
  ),
  Mutant(
    "parallel/pipeline/cost.py", "a round that is not full waits like others",
    "2 * max(0, left - 1))", "2 * left)",
    f"{_PIPELINE}/simulate_test.py::test_exposed_hops_of_1f1b",
  ),
  Mutant(
    "parallel/pipeline/simulate.py", "messages do not queue",
    "leave = max(end, links[way][stage])", "leave = end",
    f"{_PIPELINE}/simulate_test.py::test_order_of_times",
  ),
  Mutant(
    "parallel/pipeline/simulate.py", "who waits computes under its sends",
    "        free[stage] = sent\n", "        free[stage] = end\n",
    f"{_PIPELINE}/simulate_test.py::test_steps_by_hand",
  ),
  Mutant(
    "parallel/pipeline/simulate.py", "a tick costs its hops or its parts",
    "(computing.max(1) + sending.max(1)).sum()",
    "np.maximum(computing.max(1), sending.max(1)).sum()",
    f"{_PIPELINE}/simulate_test.py::test_lockstep_by_hand",
  ),
  Mutant(
    "parallel/network/trace.py", "cotangents are on the row of outputs",
    "row = 3 * stage + (1 if kind is Kind.FORWARD else 2)",
    "row = 3 * stage + 1",
    f"{_PIPELINE}/simulate_test.py::"
    "test_a_trace_has_a_bar_for_every_action_and_message",
  ),
  Mutant(
    "caatnet/studies/pipeline/study.py", "a part has a stage's activations",
    "    // table.num_chunks,\n", "    // 1,\n",
    "tests/caatnet/studies/pipeline_test.py::"
    "test_rows_are_those_of_the_whole_model",
  ),
  Mutant(
    "caatnet/studies/pipeline/study.py", "one half of a backward recomputes",
    "(again_s if table.splits else 0.0)", "(0.0 if table.splits else 0.0)",
    "tests/caatnet/studies/pipeline_test.py::"
    "test_both_halves_of_a_backward_recompute",
  ),
]

_RUN_STAGES = "tests/parallel/pipeline/run_test.py"

_KEPT = "tests/parallel/pipeline/residuals_test.py"

_STAGES_ROWS = [
  Mutant(
    "parallel/pipeline/residuals.py", "weights are kept with activations",
    "if i >= num and i == first and program.reads_last(i)",
    "if i >= num and i == first",
    f"{_KEPT}::test_what_is_kept_depends_on_the_input_and_is_kept_once",
  ),
  Mutant(
    "parallel/pipeline/residuals.py", "the first half does the second's work",
    "self._moving = [i for i in numbers if program.reads_last(i)]",
    "self._moving = []",
    f"{_KEPT}::test_gradients_are_those_of_one_program",
  ),
  Mutant(
    "parallel/pipeline/residuals.py", "parameters' tangents are not known",
    "partial_eval.dce_jaxpr(\n"
    "      self._closed.jaxpr, [i in wanted for i in range(len(self.shapes))]",
    "partial_eval.dce_jaxpr(\n"
    "      self._closed.jaxpr, [i >= 0 for i in range(len(self.shapes))]",
    f"{_KEPT}::test_nothing_is_computed_twice",
  ),
  Mutant(
    "parallel/pipeline/cost.py", "parts of fewer layers need no padding",
    "return size.chunks * -(-num_layers // (size.stages * size.chunks))",
    "return num_layers // size.stages",
    "tests/caatnet/train/stages_test.py::"
    "test_padding_takes_the_memory_that_is_said",
  ),
  Mutant(
    "parallel/pipeline/simulate.py", "nobody waits in lockstep",
    "lanes) - own_s", "lanes)",
    f"{_RUN_STAGES}::"
    "test_the_compiled_program_multiplies_as_often_as_the_timetable_says",
  ),
  Mutant(
    "parallel/xla/hlo.py", "a branch without a scope always runs",
    "rest = 1 - sum(part for part in parts if part is not None)", "rest = 1",
    "tests/parallel/xla/compiled_test.py::"
    "test_a_branch_counts_as_often_as_its_scope_says",
  ),
  Mutant(
    "parallel/pipeline/actions.py", "a part has its last gradients only",
    "return total + x[None].astype(total.dtype)", "return x[None] + 0 * total",
    f"{_RUN_STAGES}::test_stages_compute_what_one_piece_does",
  ),
  Mutant(
    "parallel/pipeline/run.py", "the last stage's cotangents leave",
    "dx = self.of_stage(back, 0)", "dx = self.of_stage(back, -1)",
    f"{_RUN_STAGES}::test_stages_compute_what_one_piece_does",
  ),
  Mutant(
    "parallel/pipeline/table.py", "a place is taken before it is read",
    "busy[0][0] < arrival", "busy[0][0] <= arrival",
    f"{_RUN_STAGES}::test_stages_compute_what_one_piece_does",
  ),
  Mutant(
    "parallel/pipeline/table.py", "places are never given back",
    "while busy and busy[0][0] < arrival:", "while False:",
    f"{_RUN_STAGES}::"
    "test_memory_grows_with_stages_in_flight_and_not_with_microbatches",
  ),
  Mutant(
    "parallel/xla/ledger.py", "a branch runs whenever it is reached",
    "return next(reversed(shares(where)), None)",
    "return fractions.Fraction(1)",
    f"{_RUN_STAGES}::"
    "test_neighbours_send_one_activation_each_way_in_a_tick",
  ),
]

_PLANNER = "tests/parallel/planner"
_PLANNER_ROWS = [
  Mutant(
    "parallel/outer/cost.py", "scales of codes are not sent",
    'Collective(kind, "float32", 4 * blocks)',
    'Collective(kind, "float32", 0 * blocks)',
    f"{_PLANNER}/second_pass_test.py::"
    "test_workers_send_and_keep_what_the_loop_does",
  ),
  Mutant(
    "parallel/outer/cost.py", "an outer optimizer has no momentum",
    "kept = 2 * sum(elements)", "kept = sum(elements)",
    f"{_PLANNER}/second_pass_test.py::"
    "test_workers_send_and_keep_what_the_loop_does",
  ),
  Mutant(
    "parallel/outer/cost.py", "fragments are as many as a round's steps",
    "num_layers // layers < every", "num_layers // layers <= every",
    f"{_PLANNER}/second_pass_test.py::test_runs_refuse_what_is_not_tried",
  ),
  Mutant(
    "parallel/planner/outer.py", "what overlaps takes room that is in use",
    "if not c.outer.overlap:\n    passing", "if True:\n    passing",
    f"{_PLANNER}/second_pass_test.py::"
    "test_an_exchange_takes_the_room_of_activations",
  ),
  Mutant(
    "parallel/planner/outer.py", "all fragments hide under one step",
    "sum(max(0.0, x - hidden) for x in waits)",
    "max(0.0, sum(waits) - hidden)",
    f"{_PLANNER}/second_pass_test.py::"
    "test_streaming_hides_what_a_step_s_products_cover",
  ),
  Mutant(
    "parallel/planner/latency.py", "gradients go around all workers",
    "order.reshape(-1, c.ranks, c.tensor)", "order",
    f"{_PLANNER}/second_pass_test.py::"
    "test_ranks_of_a_worker_have_a_ring_of_their_own",
  ),
  Mutant(
    "parallel/planner/latency.py", "the embedding sums the fraction p, too",
    "reductions[size] += enters", "reductions[share * size] += enters",
    f"{_PLANNER}/second_pass_test.py::test_tensor_ranks_send_what_p_leaves",
  ),
  Mutant(
    "parallel/planner/state.py", "a backward looks rows up again",
    "regathered=0", "regathered=1",
    f"{_PLANNER}/second_pass_test.py::"
    "test_partitions_send_what_their_formula_says",
  ),
  Mutant(
    "parallel/planner/second_pass.py", "what is slower is advised",
    "row.latency.total >= base.latency.total", "row.latency.total < 0",
    f"{_PLANNER}/second_pass_test.py::test_constraints_are_named",
  ),
  Mutant(
    "parallel/planner/second_pass.py", "each rank becomes a worker",
    "row = min(priced, key=lambda x: x.latency.total, default=None)",
    "row = priced[-1] if priced else None",
    f"{_PLANNER}/second_pass_test.py::"
    "test_workers_are_nodes_where_these_are_far_apart",
  ),
  Mutant(
    "parallel/planner/space.py", "stages leave reductions to the next one",
    'found["sync.carry"] = "off"', 'found["sync.carry"] = "auto"',
    f"{_PLANNER}/second_pass_test.py::"
    "test_stages_carry_no_reduction_into_the_next_one",
  ),
  Mutant(
    "parallel/planner/memory.py", "residuals are kept once",
    "copies += max(counted.stored) + max(counted.deltas)", "pass",
    f"{_PLANNER}/plan_test.py::test_residuals_take_memory_and_spare_time",
  ),
  Mutant(
    "parallel/planner/choosers.py", "AMP knows what fits",
    "    if problem.fits(c):\n      said_s", "    if c:\n      said_s",
    f"{_PLANNER}/choosers_test.py::test_amp_sees_no_link_and_no_memory",
  ),
  Mutant(
    "parallel/planner/choosers.py", "the rule takes as many stages as can be",
    "stages = min(c.stages for c in found)",
    "stages = max(c.stages for c in found)",
    f"{_PLANNER}/choosers_test.py::"
    "test_megatron_s_rule_fills_a_node_and_then_needs_few_stages",
  ),
  Mutant(
    "launch/benchmarks/planner_truth.py", "cotangents go to the next stage",
    "takes, makes = (s + 1, s - 1) if back else (s - 1, s + 1)",
    "takes, makes = (s - 1, s + 1)",
    "tests/launch/planner_truth_test.py::"
    "test_each_message_is_waited_for_in_the_order_it_is_sent_in",
  ),
  Mutant(
    "parallel/planner/space.py", "a run's mesh has stages outside of data",
    "np.moveaxis(order, 0, 1).ravel()", "order.ravel()",
    f"{_PLANNER}/plan_test.py::test_an_order_is_a_run_s_mesh",
  ),
  Mutant(
    "parallel/axes.py", "an order of devices is not heeded",
    "devices = [devices[i] for i in order]", "devices = devices[:count]",
    "tests/parallel/axes_test.py::test_an_order_says_which_device_is_where",
  ),
  Mutant(
    "parallel/planner/plan.py", "few devices are ordered by slowest links",
    "found = [_of_all_orders(x, setting) for x in of_timetables.values()]",
    "found = [candidate]",
    f"{_PLANNER}/steps_test.py::"
    "test_a_plan_loses_little_against_everything[lockstep-4-2004]",
  ),
  Mutant(
    "parallel/pipeline/simulate.py", "of many cases none waits for a link",
    "end = links[out][stage] = np.maximum(end, links[out][stage]) + busy",
    "end = links[out][stage] = end + busy",
    "tests/parallel/pipeline/simulate_test.py::"
    "test_many_cases_finish_when_each_does[gpipe]",
  ),
  Mutant(
    "parallel/planner/steps.py", "cotangents go where outputs go",
    "for by in (-1, 1)", "for by in (-1, -1)",
    f"{_PLANNER}/steps_test.py::"
    "test_many_orders_take_what_each_is_predicted_to",
  ),
  Mutant(
    "parallel/planner/device_order.py", "a link between two is priced twice",
    "ids[ids[:, i] == ids[:, j], i] = -1", "ids[ids[:, i] < -1, i] = -1",
    f"{_PLANNER}/device_order_test.py::"
    "test_exchanges_are_priced_as_if_they_were_made",
  ),
  Mutant(
    "parallel/planner/device_order.py", "the slowest link may be a changed one",
    "stays = ~(tops[:, None] == ids[:, None]).any(-1)",
    "stays = (tops[:, None] >= 0) & (ids[:, :1] >= -1)",
    f"{_PLANNER}/device_order_test.py::"
    "test_exchanges_are_priced_as_if_they_were_made",
  ),
  Mutant(
    "parallel/planner/device_order.py", "no order is annealed",
    "  if n <= _ANNEALED:\n", "  if False:\n",
    f"{_PLANNER}/device_order_test.py::"
    "test_an_order_that_was_hidden_is_found",
  ),
  Mutant(
    "parallel/planner/device_order.py", "nothing is divided by nothing",
    "    if not least.min():  # nothing is sent, or for nothing\n      break\n",
    "",
    f"{_PLANNER}/device_order_test.py::"
    "test_where_nothing_is_sent_no_order_costs_anything",
  ),
  Mutant(
    "parallel/planner/device_order.py", "what costs more is never tried",
    "rng.random(chains) < np.exp(-worse)", "worse == 0",
    f"{_PLANNER}/device_order_test.py::"
    "test_an_order_that_was_hidden_is_found",
  ),
  Mutant(
    "parallel/planner/bound.py", "units are as far apart as their ends",
    "out, into = m.min(3), m.min(1)", "out, into = m.max(3), m.max(1)",
    f"{_PLANNER}/device_order_test.py::"
    "test_the_bound_of_pairs_that_fit_together",
  ),
  Mutant(
    "parallel/planner/bound.py", "the last stage waits for a hop, too",
    "for _ in range(grid.stages - 1):", "for _ in range(grid.stages):",
    f"{_PLANNER}/device_order_test.py::"
    "test_the_bound_of_equal_links_is_what_any_order_costs",
  ),
  Mutant(
    "parallel/planner/latency.py", "only stage 0 has a data ring",
    "data=float(ring.max()),", "data=float(ring[0]),",
    f"{_PLANNER}/plan_test.py::test_every_stage_s_ring_counts",
  ),
  Mutant(
    "parallel/planner/latency.py", "a forward that runs again sends nothing",
    '(2 if _recomputes(c) else 0) + (c.remat == "full")',
    "(2 if _recomputes(c) else 0)",
    f"{_PLANNER}/plan_test.py::"
    "test_tensor_ranks_reduce_what_the_model_s_formula_says",
  ),
  Mutant(
    "parallel/planner/memory.py", "one moment, not two",
    'optimizer=x["stored"] - parameters,', "optimizer=parameters,",
    f"{_PLANNER}/plan_test.py::"
    "test_memory_of_the_state_is_four_floats_of_each_parameter",
  ),
  Mutant(
    "parallel/planner/plan.py", "of alike ones the slowest is priced",
    "if not any(more(c, other) for other, _ in found)",
    "if not any(more(other, c) for other, _ in found)",
    f"{_PLANNER}/plan_test.py::"
    "test_the_best_is_no_slower_than_any_that_fits",
  ),
  Mutant(
    "launch/benchmarks/measured_links.py", "columns send",
    "latency_s[i, j], bandwidth[i, j] =", "latency_s[j, i], bandwidth[j, i] =",
    "tests/launch/plan_test.py::test_fits_are_put_where_messages_went",
  ),
  Mutant(
    "parallel/hardware/cluster_files.py", "a node's rate is between nodes",
    "matrices = [m[np.ix_(nodes, nodes)] for m in matrices]",
    "matrices = [m[np.ix_(nodes, nodes)].T for m in matrices]",
    "tests/parallel/clusters_test.py::"
    "test_rows_of_nodes_stand_for_all_their_devices",
  ),
]

_GRAPHS = "tests/caatnet/data/graphs_test.py"
_ROWS = "tests/parallel/memory/features_test.py"
_GRAPH_MODEL = "tests/caatnet/models/graph_test.py"
_GRAPH_ROWS = [
  Mutant(
    "caatnet/data/graphs/paging.py", "limits of groups above do not count",
    "      if above == top:\n", "      if True:\n",
    "tests/caatnet/data/paging_test.py::"
    "test_the_least_limit_above_a_process_counts",
  ),
  Mutant(
    "caatnet/data/graphs/paging.py", "large files are read with neighbours",
    "mapped.madvise(mmap.MADV_RANDOM)", "mapped.madvise(mmap.MADV_NORMAL)",
    "tests/caatnet/data/paging_test.py::"
    "test_a_file_larger_than_memory_is_read_row_by_row",
  ),
  Mutant(
    "caatnet/data/graphs/csr.py", "later chunks overwrite earlier ones",
    "free[nodes[first]] += counts", "free[nodes[first]] += 0",
    f"{_GRAPHS}::test_neighbours_are_those_of_the_edges",
  ),
  Mutant(
    "caatnet/data/graphs/csr.py", "a graph lacks rows",
    "    if count != num_nodes:", "    if count > num_nodes:",
    f"{_GRAPHS}::test_a_writer_that_fails_leaves_no_graph",
  ),
  Mutant(
    "caatnet/data/graphs/builders.py", "b and c change places",
    "quarter = (draw >= a).view(np.uint8) + (draw >= a + b)",
    "quarter = (draw >= a).view(np.uint8) * 2 + (draw >= a + b) * 0",
    f"{_GRAPHS}::test_rmat_has_its_quarters_and_its_seed",
  ),
  Mutant(
    "caatnet/data/graphs/sampling.py", "a neighbour is taken twice",
    "draw = np.where(taken, last, draw)", "draw = np.where(taken, draw, draw)",
    f"{_GRAPHS}::test_the_compiled_sampler_is_the_reference",
  ),
  Mutant(
    "caatnet/data/graphs/sampling.py", "both samplers skip the last neighbour",
    "draw = np.int64((bits >> s32) * np.uint64(last + 1) >> s32)",
    "draw = np.int64((bits >> s32) * np.uint64(max(last, 1)) >> s32)",
    f"{_GRAPHS}::test_all_sets_of_neighbours_are_alike",
  ),
  Mutant(
    "caatnet/data/graphs/bayes.py", "messages of places that do not count",
    "message = np.where(there[..., None], message, 0).sum(axis=2)",
    "message = message.sum(axis=2)",
    f"{_GRAPHS}::test_bayes_rule_is_the_sum_over_all_communities",
  ),
  Mutant(
    "caatnet/data/graphs/data.py", "all epochs have one order",
    "np.random.SFC64([seed, epoch])", "np.random.SFC64([seed, 0])",
    f"{_GRAPHS}::test_epochs_hold_every_node_once_in_another_order",
  ),
  Mutant(
    "caatnet/train/feed.py", "the position is that of what was drawn",
    "return self._state\n\n  def set_state",
    "return self._batches.get_state()\n\n  def set_state",
    "tests/caatnet/train/feed_test.py::"
    "test_batches_and_positions_do_not_depend_on_what_is_ahead",
  ),
  Mutant(
    "caatnet/models/graph.py", "a sample's sum is that of all neighbours",
    "share = degree / jnp.maximum(count, 1) / jnp.sqrt(degree + 1.0)",
    "share = 1 / jnp.sqrt(degree + 1.0)",
    f"{_GRAPH_MODEL}::test_a_network_is_its_oracle",
  ),
  Mutant(
    "caatnet/models/graph.py", "a mean counts places that do not count",
    "mean = total / jnp.maximum(count, 1)[..., None].astype(x.dtype)",
    "mean = total / below.shape[2]",
    f"{_GRAPH_MODEL}::test_a_network_is_its_oracle",
  ),
  Mutant(
    "parallel/memory/alignment.py", "pieces begin where lines do",
    "total = whole * _spanned(starts, LINE_BYTES, size)",
    "total = whole * _spanned(starts * 0, LINE_BYTES, size)",
    "tests/parallel/memory/alignment_test.py::"
    "test_counts_are_those_over_addresses",
  ),
  Mutant(
    "parallel/memory/caches.py", "Belady looks back and not ahead",
    "following[order[:-1][again]] = order[1:][again]",
    "following[order[:-1][again]] = order[:-1][again]",
    "tests/parallel/memory/caches_test.py::"
    "test_belady_is_the_best_of_all_choices",
  ),
  Mutant(
    "parallel/memory/features.py", "what is cached is fetched as well",
    "return unique[missing], slot[inverse].reshape(ids.shape)",
    "return unique, (slot[inverse] * 0 + len(self.table.hot) + inverse"
    ").astype(np.int32).reshape(ids.shape)",
    f"{_ROWS}::test_each_row_is_asked_for_once_and_hits_not_at_all",
  ),
  Mutant(
    "parallel/memory/ways.py", "an owner answers in the order of its rows",
    "places[device, sorted_ids] = whose * self.capacity + number",
    "places[device] = whose * self.capacity + number",
    f"{_ROWS}::test_rows_are_those_of_the_table",
  ),
  Mutant(
    "parallel/kernels/gather_rows/tpu.py", "the first row of each block",
    "place = (ids % per_block)[:, None, None]",
    "place = (ids * 0)[:, None, None]",
    "tests/parallel/kernels/gather_rows_test.py::test_a_kernel_is_the_reference",
  ),
  Mutant(
    "parallel/kernels/gather_rows/gpu.py", "no second span of a wide row",
    "column += span", "column += 2 * span",
    "tests/parallel/kernels/gather_rows_test.py::test_a_kernel_is_the_reference",
  ),
  Mutant(
    "launch/benchmarks/kernel_subjects.py", "the table is on the device",
    'memory_kind="pinned_host" if is_compiled',
    'memory_kind=None if is_compiled',
    "tests/launch/kernels_test.py::"
    "test_a_kernel_s_table_is_in_the_host_s_memory_as_it_lies_there",
  ),
  Mutant(
    "parallel/kernels/gather_rows/order.py", "a last block that is not full",
    "return -(-num_rows * padded_width(width) // _WORDS), *BLOCK",
    "return num_rows * padded_width(width) // _WORDS, *BLOCK",
    "tests/launch/kernels_test.py::"
    "test_a_kernel_s_table_is_in_the_host_s_memory_as_it_lies_there",
  ),
  Mutant(
    "parallel/memory/features.py", "a cache of all rows has no buffer",
    "self.capacity.get(places, -1)", "self.capacity.get(places, 0)",
    "tests/parallel/memory/features_test.py::test_a_cache_may_hold_all_rows",
  ),
  Mutant(
    "caatnet/train/step.py", "evaluation mixes up workers and lanes",
    "x = jnp.moveaxis(x, 0, num_dims - 1)", "x = jnp.moveaxis(x, 0, 0)",
    f"{_GRAPH_MODEL}::test_a_partition_is_evaluated_on_any_devices",
  ),
  Mutant(
    "caatnet/data/graphs/data.py", "a single example is of the first epoch",
    "batch = self._at(number, 1)",
    "batch = self._at(number % len(self._trees.nodes), 1)",
    f"{_GRAPH_MODEL}::test_single_examples_are_those_of_batches",
  ),
]

_DATACENTRE = "tests/parallel/planner/datacentre_test.py"
_PAGE = "tests/caatnet/studies/datacentre_test.py"
_DATACENTRE_ROWS = [
  Mutant(
    "parallel/planner/datacentre.py", "chunks do not shorten a bubble",
    'n("chunks") * n("microbatches") + n("stages") - 1',
    'n("microbatches") + n("stages") - 1',
    f"{_DATACENTRE}::test_bytes_and_bubble_are_those_of_the_programs",
  ),
  Mutant(
    "parallel/planner/datacentre.py", "restarts do not fail",
    'mtbf * exp(minimum(n("restart_s") / mtbf, _LARGE)) * work', "mtbf * work",
    f"{_DATACENTRE}::test_goodput_is_what_failures_leave",
  ),
  Mutant(
    "parallel/planner/datacentre.py", "a full tree has a tier more",
    'log(n("radix") / 2) - 1e-9', 'log(n("radix") / 2) + 1e-9',
    f"{_DATACENTRE}::test_a_fat_tree_that_is_just_full_has_no_tier_more",
  ),
  Mutant(
    "parallel/planner/datacentre.py", "small sites first",
    "key=lambda key: -places[key]", "key=lambda key: places[key]",
    f"{_DATACENTRE}::test_sites_are_filled_by_size",
  ),
  Mutant(
    "parallel/planner/uncertainty.py", "decisions are drawn",
    "    if key not in knobs.DECISIONS\n", "",
    f"{_DATACENTRE}::test_draws_are_plans",
  ),
  Mutant(
    "parallel/planner/knobs.py", "a range goes beyond what makes sense",
    "max(low, knob.least), min(high, knob.most)", "max(low, knob.least), high",
    f"{_DATACENTRE}::test_draws_are_around_the_plan",
  ),
  Mutant(
    "parallel/planner/datacentre.py", "software is repaired",
    'n("repair_h") * _HARDWARE / n("mtbf_h")', 'n("repair_h") / n("mtbf_h")',
    f"{_DATACENTRE}::test_the_default_plan",
  ),
  Mutant(
    "caatnet/studies/datacentre/study.py", "a rack's sources are lost",
    "sources = dict(sites.RACKS[kind].sources)", "sources: dict = {}",
    f"{_PAGE}::test_knobs_have_the_sources_of_who_set_them",
  ),
  Mutant(
    "launch/graph.py", "a graph is written where others read",
    "files.whole_folder(output) as folder",
    "__import__('contextlib').nullcontext(output) as folder",
    "tests/launch/graphs_test.py",
  ),
  Mutant(
    "caatnet/models/classes.py", "the likeliest class is the least likely",
    "jnp.argmax(log_probs", "jnp.argmin(log_probs",
    "tests/caatnet/models/graph_test.py",
  ),
  Mutant(
    "parallel/planner/knobs.py", "ranges stay where another rack's are",
    "(end * value / knob.value for end in (knob.low, knob.high))",
    "(min(knob.low, value), max(knob.high, value))",
    f"{_DATACENTRE}::test_draws_are_around_the_plan",
  ),
  Mutant(
    "parallel/planner/datacentre.py", "more replicas than microbatches",
    'floor(n("fit")), floor(n("batch_tokens") / n("microbatch_tokens"))',
    'floor(n("fit")), floor(n("fit"))',
    f"{_DATACENTRE}::test_a_model_that_fits_nowhere_and_one_that_needs_little",
  ),
  Mutant(
    "parallel/planner/expressions.py", "a page rounds up otherwise",
    '"Math.ceil({})"', '"Math.round({})"',
    f"{_PAGE}::test_the_page_computes_what_python_does",
  ),
  Mutant(
    "caatnet/studies/datacentre/page.py", "a text ends the page's script",
    '.replace("</", "<\\\\/")', "",
    f"{_PAGE}::test_the_page_shows_what_it_was_given",
  ),
]

MUTANTS = (
  *_COLLECTIVES, *_TENSOR, *_QUANTIZED, *_CODECS, *_OTHER_KERNELS, *_ZERO,
  *_OUTER, *_SCHEDULES_ROWS, *_PIPELINE_ROWS, *_NETWORK_ROWS, *_PLACES,
  *_XLA_ROWS, *_MODELS, *_TRAINING, *_DATA_ROWS, *_BUILD_ROWS, *_STUDIES_ROWS,
  *_DOCUMENTS_ROWS, *_PODS, *_GENERATION, *_TOKENIZERS, *_SCORES, *_WEIGHTS,
  *_STAGES_ROWS, *_SERVING_ROWS, *_TRANSPORT, *_SWARMS, *_HOSTS,
  *_PLANNER_ROWS, *_DATACENTRE_ROWS, *_GRAPH_ROWS,
)

if __name__ == "__main__":
  from tests import run_mutants

  sys.exit(run_mutants.main())
