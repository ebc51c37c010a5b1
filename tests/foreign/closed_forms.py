"""Bytes that each program of another project sends, written by hand.

The sizes are those of the programs (`with_NAME.py`), which other Pythons run.
"""

from tests.foreign import (
  sharded_step,
  with_brax,
  with_drjax,
  with_equinox,
  with_flax,
  with_jraph,
  with_keras,
  with_levanter,
  with_maxtext,
  with_mctx,
  with_penzai,
  with_ringattention,
)

# (axes, kind) -> operand bytes of one run on one device. With a third element,
# "unknown", the number of runs is data: bytes of one execution of each.
Sends = dict[tuple[str, ...], int]


def _brax() -> dict[str, Sends]:
  seen, hidden = with_brax.OBSERVATION, with_brax.HIDDEN
  # Weights and biases of three layers.
  size = seen * hidden + hidden + hidden * hidden + hidden + hidden + 1
  return {
    # Number of observations (int32), sums of differences, of their squares.
    "statistics": {("i", "all_reduce"): 4 * (1 + 2 * seen)},
    "gradients": {("i", "all_reduce"): 4 * size},
    "sharded": sharded_step.sends(size, 1),
  }


def _drjax() -> dict[str, Sends]:
  # The mean of the clients' weights; their own steps send nothing.
  size = with_drjax.INPUTS * with_drjax.OUTPUTS
  return {"round_of_averaging": {("clients", "all_reduce"): 4 * size}}


def _equinox() -> dict[str, Sends]:
  p = with_equinox
  # Gradients of two layers with biases.
  size = p.INPUTS * p.HIDDEN + p.HIDDEN + p.HIDDEN * p.OUTPUTS + p.OUTPUTS
  return {"data_parallel": {("batch", "all_reduce"): 4 * size}}


def _flax() -> dict[str, Sends]:
  p = with_flax
  return {
    # Means of x and of its square.
    "batch_norm": {("data", "all_reduce"): 4 * 2 * p.WIDTH},
    # Forward, the sum over heads for a device's batch; gradients of four
    # matrices, of which a device has a quarter, and the loss.
    "attention": {
      ("model", "all_reduce"): 4 * p.BATCH // 2 * p.LENGTH * p.WIDTH,
      ("data", "all_reduce"): 4 * (4 * p.WIDTH**2 // 4 + 1),
    },
    # Forward, the sum of the second product; gradients of both matrices, of
    # which a device has a half, and the loss.
    "nnx_mlp": {
      ("model", "all_reduce"): 4 * p.BATCH // 4 * p.WIDTH,
      ("data", "all_reduce"): 4 * (2 * p.WIDTH * p.HIDDEN // 2 + 1),
    },
    "sharded": sharded_step.sends(4 * p.WIDTH**2, p.WIDTH),
  }


def _jraph() -> dict[str, Sends]:
  p = with_jraph
  # Sums over edges for the senders, the receivers, and the graphs.
  rows = 2 * p.NODES + p.GRAPHS
  return {"sharded_edges": {("i", "all_reduce"): 4 * rows * p.WIDTH}}


def _keras() -> dict[str, Sends]:
  p = with_keras
  up, down = p.INPUTS * p.HIDDEN + p.HIDDEN, p.HIDDEN * p.CLASSES
  return {
    # Gradients of both layers, and the loss.
    "data_parallel": {
      ("batch", "all_reduce"): 4 * (up + down + p.CLASSES + 1)
    },
    # A device has a quarter of the kernels and of the first bias. The second
    # product is summed over these parts.
    "model_parallel": {
      ("model", "all_reduce"): 4 * p.BATCH // 2 * p.CLASSES,
      ("batch", "all_reduce"): 4 * ((up + down) // 4 + p.CLASSES + 1),
    },
  }


def _levanter() -> dict[str, Sends]:
  p = with_levanter
  table = p.VOCABULARY * p.WIDTH
  # Elements of a layer's seven matrices on a device, when they are gathered.
  layer = (4 * p.WIDTH**2 + 3 * p.WIDTH * p.HIDDEN) // p.MODEL
  gains = 2 * p.WIDTH
  stream = p.BATCH // p.DATA * p.LENGTH * p.WIDTH
  # The compiler's choices were added after the reading: it reshards the
  # embedding, twice, from "data" to "model" by a permute, and once by a gather
  # in pairs of devices that are no axis; and it sums the cotangents of queries,
  # keys, values, gates and neurons one by one.
  return {"llama": {
    # Matrices forward and backward, gains forward; last norm, and head.
    ("data", "all_gather"): 4 * (
      p.LAYERS * (2 * layer + gains) + p.WIDTH + table
    ) // p.DATA,
    # Gradients, of the embedding by halves; loss and number of tokens, and
    # squared norms of 12 gradients, of which 7 are cut over "model", too.
    ("data", "all_reduce"): 4 * (
      p.LAYERS * (layer + gains) + p.WIDTH + table // p.MODEL + 2 + 12
    ),
    # Attention and neurons, forward; cotangents of the head, for which the
    # axis is replicated.
    ("model", "all_reduce"): 4 * (p.LAYERS * (2 + 5) * stream + stream + 7),
    ("data,model", "all_reduce"): 4 * table,  # likewise, the head's gradient
    ("model", "all_gather"): 4 * stream // p.MODEL,  # of embedded tokens
    ("data,model", "permute"): 2 * 4 * table // p.DATA,
    ("2 devices", "all_gather"): 4 * table // p.DATA,
  }}


def _maxtext() -> dict[str, Sends]:
  p = with_maxtext
  attention, table = 4 * p.WIDTH * p.HEADS * p.HEAD, p.VOCABULARY * p.WIDTH
  # Sums of squares of each parameter: of gradients, twice, as XLA does not
  # merge equal ones; of clipped gradients; and of new parameters.
  norms = 4
  return {
    "llama": _maxtext_llama(attention, table, norms),
    "mixtral": _maxtext_mixtral(attention, table, norms),
  }


def _maxtext_llama(attention: int, table: int, norms: int) -> Sends:
  """Returns what it sends; elements of matrices of a layer and of a table."""
  p = with_maxtext
  tokens = p.BATCH // p.FSDP * p.LENGTH  # of a device
  stream = tokens * p.WIDTH
  matrices = p.LAYERS * (attention + 3 * p.WIDTH * p.HIDDEN)
  gains = (2 * p.LAYERS + 1) * p.WIDTH
  # The compiler's choices were added after the reading. The embedding is not
  # gathered over "fsdp", but looked up for all tokens: these are gathered in
  # two steps, and the result is sent to where its examples are. The stream is
  # gathered once for queries, and once for keys and values; and again for the
  # gradients of the matrices that it is multiplied with.
  return {
    # Matrices forward and backward, and the head.
    ("fsdp", "all_gather"): 4 * (2 * matrices + table) // p.TENSOR // p.FSDP,
    # Gradients; loss, z-loss, number of tokens; squares of 9 matrices.
    ("fsdp", "all_reduce"): 4 * (
      (matrices + 2 * table + gains) // p.TENSOR + 3 + 9 * norms
    ),
    # The stream, which is cut: in a layer before attention and neurons, again
    # in the backward, and both cotangents; before the head, and the cotangent
    # of the embedding. These would be 6 and 2.
    ("tensor", "all_gather"): 4 * (
      (p.LAYERS * (3 + 8) + 2 + 1) * stream // p.TENSOR + 2 * tokens
    ),
    # In a layer: outputs of attention and neurons, cotangents of queries, keys,
    # values, gates and neurons; means of squares, again, and their cotangents.
    # Embedding, cotangent of the head, last norm and its cotangent; maximum,
    # sum and target of the loss; squares of 12 parameters.
    ("tensor", "all_reduce"): 4 * (
      p.LAYERS * (7 * stream + 6 * tokens) + 2 * stream + 2 * tokens
      + 3 * tokens + 12 * norms
    ),
    ("fsdp,tensor", "permute"): 4 * (tokens + stream // p.TENSOR),
    ("2 devices", "all_gather"): 4 * tokens,
    ("2 devices", "all_to_all"): 4 * stream // p.TENSOR,
  }


def _maxtext_mixtral(attention: int, table: int, norms: int) -> Sends:
  """Returns what it sends; elements of matrices of a layer and of a table."""
  p = with_maxtext
  devices = p.MOE_FSDP * p.EXPERT
  tokens = p.BATCH // devices * p.LENGTH  # of a device
  gate = p.WIDTH * p.EXPERTS
  expert = p.EXPERTS // p.EXPERT * p.WIDTH * p.HIDDEN  # of three matrices
  capacity = p.LENGTH * p.CHOSEN // p.EXPERTS
  places = p.EXPERTS * p.BATCH // devices * capacity
  # After the reading were added: the embedding, which is not gathered, but
  # looked up for all tokens, and exchanged; gathers around `top_k` and the
  # scatter of weights, which the partitioner does not know to be of a device's
  # own tokens; and the output of experts, whose constraint does not leave out
  # "expert" as those before it do. Down projections are therefore gathered over
  # it, neurons exchanged, and both operands of the gradient gathered.
  return {
    # Matrices of attention and the gate, forward and backward, and the head.
    # Indices of tokens, and of the scatter in both loops; in a layer logits,
    # indices and weights, again, and cotangents of weights and outputs.
    ("fsdp,expert", "all_gather"): 4 * (
      2 * p.LAYERS * (attention + gate) + table
    ) // devices + 4 * (
      tokens * (1 + 2 * p.CHOSEN) + p.LAYERS * (
        tokens * (3 * p.EXPERTS + 2 * (3 + 1) * p.CHOSEN) + places * p.WIDTH
      )
    ),
    # Gradients, but for the embedding; loss, z-loss, number of tokens; squares
    # of 7 matrices, which are cut over both axes along one dim.
    ("fsdp,expert", "all_reduce"): 4 * (
      p.LAYERS * (attention + gate + 2 * p.WIDTH) + table + p.WIDTH
      + 3 + 7 * norms
    ),
    ("fsdp,expert", "all_to_all"): 4 * 2 * tokens * p.WIDTH,
    # Matrices of experts forward and backward, and neurons. The gradients of
    # two matrices, and squares.
    ("fsdp", "all_gather"): 4 * p.LAYERS * (
      2 * 3 * expert // p.MOE_FSDP + places * p.HIDDEN
    ),
    ("fsdp", "all_reduce"): 4 * (p.LAYERS * 2 * expert + 3 * norms),
    ("expert", "all_gather"): 4 * p.LAYERS * expert,
    ("expert", "all_reduce"): 4 * 3 * norms,
    # Tokens to experts, again in the backward, and both cotangents; and back.
    ("expert", "all_to_all"): 4 * p.LAYERS * places * (4 * p.WIDTH + p.HIDDEN),
  }


def _mctx(num_devices: int) -> dict[str, Sends]:
  p = with_mctx
  batch = num_devices * p.BATCH
  # Written after its reading, unlike the others: trees are independent, so the
  # form was "nothing" at first, but the partitioner does not know it. In each
  # simulation it gathers the indices of the nodes to read, two pairs and one
  # triple of int32 per tree, and sums what is read: an embedding, and two
  # integers. Four loops end when no tree continues, which all devices must
  # know; how many times is data.
  return {"search": {
    ("batch", "all_gather"): p.SIMULATIONS * 4 * p.BATCH * (2 + 2 + 3),
    ("batch", "all_reduce"): p.SIMULATIONS * 4 * batch * (p.WIDTH + 2),
    ("batch", "all_reduce", "unknown"): 4,
  }}


def _penzai() -> dict[str, Sends]:
  p = with_penzai
  # Sums over heads and over neurons in each block, for a device's batch.
  size = p.BATCH // 2 * p.LENGTH * p.WIDTH
  return {"llama": {("model", "all_reduce"): 4 * 2 * p.BLOCKS * size}}


def _ringattention() -> dict[str, Sends]:
  p = with_ringattention
  size = p.BATCH * p.LENGTH * p.HEADS * p.WIDTH
  # Eight rounds of keys and values, then of these and their gradients. The last
  # round of each returns them to where they were.
  return {"causal": {("sp", "permute"): 8 * (2 + 4) * 4 * size}}


def programs(num_devices: int = 8) -> dict[str, dict[str, Sends]]:
  """Returns project -> program -> bytes, on a number of devices.

  Batches grow with the devices, so that most sizes do not depend on it.
  """
  return {
    "brax": _brax(), "drjax": _drjax(), "equinox": _equinox(), "flax": _flax(),
    "jraph": _jraph(), "keras": _keras(), "levanter": _levanter(),
    "maxtext": _maxtext(), "mctx": _mctx(num_devices), "penzai": _penzai(),
    "ringattention": _ringattention(),
  }


PROGRAMS = programs()
