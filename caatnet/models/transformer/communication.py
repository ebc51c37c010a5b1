"""What one training step sends, in closed form: the ledger's second opinion.

Per microbatch of n tokens, the tensor axis all-reduces (by the route
"one_shot" row doors all-gather operands of the same size)

    forward:  n H (embedding) + sum over row doors of n k + O(n) (softmax)
    backward: n H (stack entry) + sum over row doors of n k

and, with full rematerialisation, a block's attention door once more, and the
MLP's where its update is carried into the next block; per step
(2L + 1) H for the norm gains and one number per sliced parameter for the
gradient norm. Source: the CAAT-Net notes of arXiv 2506.19645, section 3 of
its formulas; the tests hold this equal to the lowered program.
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
  """Reductions over the tensor axis in one training step.

  Args:
    config: The model.
    data_lanes: Data shards per device.
    batch_size: Sequences of one microbatch of one data shard.
    seq_len: Positions.
    accumulation: Microbatches per step.

  Returns:
    How often each is executed per step.

  Raises:
    ValueError: A route that is not one collective.
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
        # Recomputing a layer runs again what its second half depends on; an
        # update that it got from the layer before is reduced in it, too.
        carried = config.carry and layer < config.num_layers - 1
        if config.remat == "full" and (door == 0 or carried):
          add("backward", forward, *tokens, k, kind=door_kind)
  add("forward", "float32", *tokens)  # largest logit
  add("forward", "float32", 2, *tokens)  # normaliser, target
  gains = config.num_layers, config.width
  slices = 5 if config.tied_embeddings else 6
  for shape in (gains, gains, (config.width,), (slices,)):
    count[Reduction("update", "float32", shape)] += 1
  return count
