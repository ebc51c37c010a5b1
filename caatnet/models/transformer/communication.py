"""Counts in closed form what one training step reduces over the tensor axis.

Per microbatch of n tokens the elements are

    forward:  n H (embedding) + sum over row doors of n k + O(n) (softmax)
    backward: n H (stack entry) + sum over row doors of n k

All go by all-reduce; with the route "one_shot", row doors all-gather operands
of the same size instead. Full rematerialisation runs a block's attention door
again in the backward, and the MLP's door where its update is carried into the
next block. Once per step there are (2 L + 1) H elements for the gradients of
the norms' gains, 2 L times the width of a head more where queries and keys are
normalised, and one for each sliced parameter for the gradient norm.

Source: Lamprecht et al., arXiv 2506.19645, section 3. The tests hold this equal
to the ledger of the lowered program.
"""

import collections

from caatnet.models.protocol import Reduction
from caatnet.models.transformer.config import TransformerConfig

# Routes of row doors with one collective each -> its kind.
_KINDS = {"psum": "all_reduce", "one_shot": "all_gather"}


def tensor_reductions(
  config: TransformerConfig,
  *,
  data_lanes: int,
  batch_size: int,
  seq_len: int,
  accumulation: int = 1,
) -> collections.Counter[Reduction]:
  """Counts the reductions over the tensor axis in one training step.

  Args:
    config: The model.
    data_lanes: Data-parallel ranks on one device.
    batch_size: Sequences of one microbatch of one data-parallel rank.
    seq_len: Positions.
    accumulation: Microbatches per step.

  Returns:
    How often each reduction runs in a step.

  Raises:
    ValueError: A row door's route is not one collective.
  """
  tokens = (data_lanes, batch_size, seq_len)
  width, dtype = config.width, config.dtype
  count: collections.Counter[Reduction] = collections.Counter()

  def add(phase, dtype, *shape, kind="all_reduce"):
    count[Reduction(phase, dtype, tuple(shape), kind)] += accumulation

  add("forward", dtype, *tokens, width)
  entry = config.syncs[0][0].backward_dtype or dtype
  add("backward", entry, *tokens, width)
  for layer, syncs in enumerate(config.syncs):
    for door, sync in enumerate(syncs):
      k = sync.num_shared(width)
      if k:
        if sync.route not in _KINDS:
          raise ValueError(
            f"config.sync.route={sync.route!r}: the formula has "
            f"{', '.join(_KINDS)}"
          )
        door_kind = _KINDS[sync.route]
        forward = sync.forward_dtype or dtype
        backward = sync.backward_dtype or dtype
        add("forward", forward, *tokens, k, kind=door_kind)
        add("backward", backward, *tokens, k, kind=door_kind)
        # The backward of a layer recomputes what its own backward reads. The
        # MLP needs the stream after attention, so attention's door runs again.
        # The MLP's own update is read by the next layer only: its door runs
        # again where that layer reduces it.
        carried = config.carry and layer < config.num_layers - 1
        if config.remat == "full" and (door == 0 or carried):
          add("backward", forward, *tokens, k, kind=door_kind)
  add("forward", "float32", *tokens)  # largest logit
  add("forward", "float32", 2, *tokens)  # normaliser, target
  # Once per step: gradients of the gains of norm_1, norm_2 and the last norm,
  # and the squares of each sliced parameter: embedding, four of a block and its
  # biases, head.
  gains = config.num_layers, config.width
  slices = 6 - config.tied_embeddings + config.qkv_bias
  of_heads = [(config.num_layers, config.head_width)] * 2 * config.qk_norm
  for shape in (gains, gains, *of_heads, (config.width,), (slices,)):
    count[Reduction("update", "float32", shape)] += 1
  return count
