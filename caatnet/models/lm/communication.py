"""Closed formulas for a language model's collectives over the tensor axis.

The collectives of a training step, in elements per microbatch of n tokens, with
H = width of the stream, L = layers and k = shared channels of a row-parallel
projection:

    forward:  n H (embedding) + sum over projections of n k + O(n) (softmax)
    backward: n H (stack entry) + sum over projections of n k

All are all-reduces; with ``sync.route`` "one_shot", row-parallel projections
all-gather operands of the same size instead. With full rematerialisation, the
backward repeats a layer's first row-parallel projection, and also the MLP's if
its reduction is deferred to the next layer. Once per step, all-reduces sum the
(2 L + 1) H elements of the norm gains' gradients, the gradients of other
parameters that every rank has whole (`StackConfig.gains`), and one element per
sliced parameter for the gradient norm.

An inference step with n tokens (prompt tokens, and one per decoding sequence)
has the forward's n H and n k only. The head is not reduced: every rank keeps
its slice of the logits of the requested rows. Communication of sampling from
these slices is not counted here.

Source: Lamprecht et al., arXiv 2506.19645, section 3. Tests compare these
formulas with the collectives in the lowered program (`parallel.ledger`).
"""

import collections
import itertools

from caatnet.models.lm.config import StackConfig
from caatnet.models.protocol import Reduction
from parallel.tensor.partial_sync import PartialSync

# Kind of collective by `PartialSync.route`, for routes of a single collective.
_KIND_OF_ROUTE = {"psum": "all_reduce", "one_shot": "all_gather"}


def tensor_reductions(
  config: StackConfig,
  *,
  data_lanes: int,
  batch_size: int,
  seq_len: int,
  accumulation: int = 1,
) -> collections.Counter[Reduction]:
  """Counts the collectives over the tensor axis in one training step.

  Args:
    config: The model.
    data_lanes: Data-parallel ranks on one device.
    batch_size: Sequences of one microbatch of one data-parallel rank.
    seq_len: Positions of a sequence.
    accumulation: Microbatches per step.

  Returns:
    Number of runs per step of each collective.

  Raises:
    ValueError: The ``route`` of a sync policy is neither "psum" nor "one_shot".
  """
  tokens = (data_lanes, batch_size, seq_len)
  width, dtype = config.width, config.dtype
  count: collections.Counter[Reduction] = collections.Counter()

  def add(phase, dtype, *shape, kind="all_reduce"):
    count[Reduction(phase, dtype, tuple(shape), kind)] += accumulation

  add("forward", dtype, *tokens, width)  # embedding
  # The entry of the stack is the identity in the forward; its transpose sums.
  entry = config.syncs[0][0].backward_dtype or dtype
  add("backward", entry, *tokens, width)
  for layer, syncs in enumerate(config.syncs):
    for projection, sync in enumerate(syncs):
      k = sync.num_shared(width)
      if k:
        reduction_kind = _collective_kind(sync)
        forward = sync.forward_dtype or dtype
        backward = sync.backward_dtype or dtype
        add("forward", forward, *tokens, k, kind=reduction_kind)
        add("backward", backward, *tokens, k, kind=reduction_kind)
        # The backward of a layer recomputes the values that it reads. The MLP's
        # backward reads the stream after attention, so attention's row-parallel
        # projection is repeated. The MLP's update is read by the next layer
        # only, so the MLP's is repeated only if that layer reduces it.
        carried = config.carry and layer < config.num_layers - 1
        if config.remat == "full" and (projection == 0 or carried):
          add("backward", forward, *tokens, k, kind=reduction_kind)
  add("forward", "float32", *tokens)  # largest logit
  add("forward", "float32", 2, *tokens)  # normaliser, target
  # Once per step: gradients of the gains of all layers and of the last norm,
  # and one sum of squares per sliced parameter (embedding, layers, head).
  gains = [(config.num_layers, *shape) for shape in config.gains]
  slices = config.num_slices + 2 - config.tied_embeddings
  for shape in (*gains, (config.width,), (slices,)):
    count[Reduction("update", "float32", shape)] += 1
  return count


def decoding_reductions(
  config: StackConfig, *, tokens: int
) -> collections.Counter[Reduction]:
  """Counts the collectives over the tensor axis in one inference step.

  Args:
    config: The model.
    tokens: Tokens of the step on one device: all tokens of prompt chunks, and
      one per decoding sequence.

  Returns:
    Number of runs per step of each collective, without sampling.

  Raises:
    ValueError: The ``route`` of a sync policy is neither "psum" nor "one_shot".
  """
  dtype, count = config.dtype, collections.Counter()
  count[Reduction("forward", dtype, (tokens, config.width))] += 1
  for sync in itertools.chain.from_iterable(config.syncs):
    k = sync.num_shared(config.width)
    if k:
      dtype = sync.forward_dtype or config.dtype
      count[
        Reduction("forward", dtype, (tokens, k), _collective_kind(sync))
      ] += 1
  return count


def _collective_kind(sync: PartialSync) -> str:
  """Returns the kind of collective that a row-parallel projection runs."""
  if sync.route not in _KIND_OF_ROUTE:
    raise ValueError(
      f"config.sync.route={sync.route!r}: the closed formula supports "
      f"{', '.join(_KIND_OF_ROUTE)}"
    )
  return _KIND_OF_ROUTE[sync.route]
