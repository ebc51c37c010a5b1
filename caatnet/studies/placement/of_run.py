"""Placement problem of a training step as `launch.train` executes it.

`parallel.plans.placement.problem.training_step` counts the bytes of published
offloading systems. A run differs from them in three ways. Its weights and
gradients are float32. Its weights stay on the device. Its gradients stay on the
device until the step's program ends, so activations and gradients are in memory
at the same time. With the optimizer on the host, XLA also allocates DRAM for
the gradients that arrive there and for the weights that are sent back; the
gradients are then copied to their tiers.

Moments, the host's arrays and saved activations are exact
(`parallel.plans.zero.cost`, and the names that ``config.model.remat`` saves).
The rest of a step's device memory is reserved, not placed. Its size is the
planner's estimate (`parallel.plans.planner.memory`), whose factors are fitted
to compiled programs.

Each device has one rank of each axis and all tiers of the host. The time of
collectives is not included. ``config.sync.p`` changes neither bytes nor FLOPs
of a device with one rank.
"""

from collections.abc import Mapping
from typing import Any

from parallel.base import checks
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.tiers import Host
from parallel.plans.placement import periods
from parallel.plans.placement.problem import (
  INSTANTS,
  ExecutionMode,
  Problem,
  StatePart,
  Tensor,
  TensorAccess,
)
from parallel.plans.planner import memory
from parallel.plans.planner.space import SCHEMES, Configuration
from parallel.plans.workload import TrainingStep

_REMATS = ("full", "reduced", "named")


def problem(
  config: Mapping[str, Any], step: TrainingStep, device: Device, host: Host,
  utilisation: float, fill: float,
) -> Problem:
  """Returns the placement problem of a training run's step on one device.

  Args:
    config: Config of a training run, as nested dicts. ``memory.optimizer``
      selects the processor that updates all parameters. With
      ``memory.activations="placement"``, layers may differ in what they save.
    step: Model and batch of the step.
    device: The device.
    host: The host.
    utilisation: Assumed fraction of the device's peak FLOP/s.
    fill: Assumed fraction of the device's memory that may be used.

  Raises:
    ValueError: The formulas do not support an option of the run; the message
      names its key.
  """
  c = _configuration(config, step.batch_size)
  found = memory.terms(c, step)
  fit = memory.FITS[device.platform].of(c)
  # If layers save different activations, they run in groups (periods) whose
  # weights and gradients are in memory at the same time.
  mixed = config["memory"]["activations"] == "placement"
  period = periods.length(step.model.num_layers) if mixed else 1
  found["gathered"] *= period
  found["streams"] = 0.0  # activations are placed, hence not reserved
  reserved = fit.estimate(found)
  tokens = c.examples(step.batch_size) * step.seq_len
  rate = utilisation * device.peak(step.model.dtype) * c.tensor / c.microbatches
  layers_s = (
    step.model.num_layers * step.model.layer_flops(tokens, step.seq_len) / rate
  )
  forward_s = layers_s + step.model.head_flops(tokens) / rate
  return Problem(
    host=host, device=device, device_bytes=fill * device.memory_bytes,
    reserved=dict.fromkeys(INSTANTS, reserved),
    seconds={"forward": forward_s, "backward": 2 * forward_s, "update": 0.0},
    parts=(
      _parameter_part(found["stored"], config["memory"]["optimizer"], step),
      _activations(config["model"]["remat"], c, step, layers_s),
    ),
    content="weights, gradients, working memory",
  )


def _configuration(
  config: Mapping[str, Any], batch_size: int
) -> Configuration:
  """Returns the training run's configuration, with all moments on the host.

  Raises:
    ValueError: See `problem`.
  """
  parallel, scheme = config["parallel"], config["zero"]["scheme"]
  for key in ("worker", "stage"):
    if parallel[key] != 1:
      raise ValueError(
        f"config.parallel.{key}={parallel[key]}: a placement of state='run' "
        "needs 1"
      )
  checks.known("config.zero.scheme=", scheme, SCHEMES)
  checks.known("config.model.remat=", config["model"]["remat"], _REMATS)
  c = Configuration(
    1, parallel["data"], parallel["tensor"], config["train"]["accumulation"],
    scheme=scheme, remat="full", offload=True,
  )
  checks.at_least(
    f"config.data.batch_size={batch_size} divided by data-parallel ranks and "
    "microbatches", c.examples(batch_size),
  )
  return c


def _parameter_part(stored: float, by: str, step: TrainingStep) -> StatePart:
  """Returns the tensors to place: moments, or the host optimizer's arrays.

  Args:
    stored: Bytes of the float32 weights that the device stores.
    by: Processor that updates all parameters, "device" or "host".
    step: The step.
  """
  if by == "device":
    uses = (TensorAccess("update", "device", read=1, written=1),)
    way = ExecutionMode("updated by the device, weights on the device", (
      Tensor("moments", step.moments * stored, INSTANTS, uses),
    ))
  else:
    arrives, leaves, both = (
      TensorAccess("update", "device", written=1),
      TensorAccess("update", "device", read=1),
      TensorAccess("update", "cpu", read=1, written=1),
    )
    # XLA allocates all gradients that arrive and all weights that are sent.
    update = ("end of backward",)
    arrived = Tensor(
      "arrived gradients", stored, update,
      (arrives, TensorAccess("update", "cpu", read=1)), "dram",
    )
    gradients = Tensor("gradients", stored, update, (both,), "host")
    state = tuple(
      Tensor(name, stored, INSTANTS, (both,), "host")
      for name in ("master weights", "first moments", "second moments")
    )
    staged = Tensor(
      "staged weights", stored, update,
      (TensorAccess("update", "cpu", written=1), leaves), "dram",
    )
    way = ExecutionMode(
      "updated by the cpu, weights on the device",
      (arrived, gradients, *state, staged),
    )
  return StatePart("parameters", (way,), step.model.num_layers)


def _activations(
  remat: str, c: Configuration, step: TrainingStep, layers_s: float
) -> StatePart:
  """Returns all layers' activations, as training saves or recomputes them.

  Args:
    remat: ``config.model.remat``: "full" saves the input of each layer,
      "reduced" also the sum of attention, "named" also queries, keys, values
      and both products of the MLP's first half.
    c: Configuration of the run.
    step: The step.
    layers_s: Seconds of the forward of all layers.
  """
  model, count = step.model, step.model.num_layers
  examples = c.examples(step.batch_size)
  tokens = examples * step.seq_len
  stream = step.boundary_bytes(examples)
  channels = (
    (model.num_heads + 2 * model.num_kv_heads) * model.head_width
    + 2 * model.ffn_width
  ) / c.tensor
  named = 2 * stream + tokens * channels * model.item_bytes
  qkv, out, first, second = model.matrices
  total = model.layer_flops(tokens, step.seq_len)
  scores = total - 2 * tokens * (qkv + out + first + second)

  def way(name: str, tensor: str, size: float, *products: int) -> ExecutionMode:
    """Returns a mode whose backward recomputes attention and ``products``.

    The mode `name` saves a layer's `tensor` of `size` bytes; `products` are the
    numbers of weights of the matrix products that it recomputes.
    """
    again = (scores + 2 * tokens * sum(products)) / total
    return ExecutionMode(
      name,
      (Tensor(tensor, count * size, ("end of forward",), (
        TensorAccess("forward", "device", written=c.microbatches),
        TensorAccess("backward", "device", read=c.microbatches),
      )),),
      {"backward": again * layers_s},
    )

  recomputed = way("recomputed", "layer inputs", stream, qkv, out, first)
  saved = {
    "full": (),
    "reduced": (way("saved", "activations", 2 * stream, qkv, first),),
    "named": (way("saved", "activations", named),),
  }[remat]
  return StatePart("activations", (*saved, recomputed), count)
