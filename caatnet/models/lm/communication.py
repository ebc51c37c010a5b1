"""Counts in closed form what a step reduces over the tensor axis.

In training the elements per microbatch of n tokens are

    forward:  n H (embedding) + sum over row doors of n k + O(n) (softmax)
    backward: n H (stack entry) + sum over row doors of n k

All go by all-reduce; with the route "one_shot", row doors all-gather operands
of the same size instead. Full rematerialisation runs a layer's first row door
again in the backward, and the MLP's door where its update is carried into the
next layer. Once per step there are (2 L + 1) H elements for the gradients of
the norms' gains, those of other parameters that every rank has whole
(`StackConfig.gains`), and one for each sliced parameter for the gradient norm.

A step of inference with n tokens, of prompts or one for each sequence that
decodes, has the forward's n H and n k only. The head sends nothing: of the
logits every rank keeps its slice, for the rows that are asked for. What
sampling a token from these slices sends is not counted here.

Source: Lamprecht et al., arXiv 2506.19645, section 3. The tests hold this equal
to the ledger of the lowered program.
"""

import collections
import itertools

from caatnet.models.lm.config import StackConfig
from caatnet.models.protocol import Reduction
from parallel.tensor.partial_sync import PartialSync

# Routes of row doors with one collective each -> its kind.
_KINDS = {"psum": "all_reduce", "one_shot": "all_gather"}


def tensor_reductions(
  config: StackConfig,
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
        door_kind = _kind(sync)
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
  # Once per step: gradients of the gains of layers and the last norm, and the
  # squares of each sliced parameter: embedding, those of a layer, head.
  gains = [(config.num_layers, *shape) for shape in config.gains]
  slices = config.num_slices + 2 - config.tied_embeddings
  for shape in (*gains, (config.width,), (slices,)):
    count[Reduction("update", "float32", shape)] += 1
  return count


def decoding_reductions(
  config: StackConfig, *, tokens: int
) -> collections.Counter[Reduction]:
  """Counts the reductions over the tensor axis in one step of inference.

  Args:
    config: The model.
    tokens: The tokens that go through the layers on one device: those of all
      chunks of prompts, and one for each sequence that decodes.

  Returns:
    How often each reduction runs in a step, those of sampling left out.

  Raises:
    ValueError: A row door's route is not one collective.
  """
  dtype, count = config.dtype, collections.Counter()
  count[Reduction("forward", dtype, (tokens, config.width))] += 1
  for sync in itertools.chain.from_iterable(config.syncs):
    k = sync.num_shared(config.width)
    if k:
      dtype = sync.forward_dtype or config.dtype
      count[Reduction("forward", dtype, (tokens, k), _kind(sync))] += 1
  return count


def _kind(sync: PartialSync) -> str:
  """Returns the kind of a row door's collective, if it is a single one."""
  if sync.route not in _KINDS:
    raise ValueError(
      f"config.sync.route={sync.route!r}: the formula has {', '.join(_KINDS)}"
    )
  return _KINDS[sync.route]
