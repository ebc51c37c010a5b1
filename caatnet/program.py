"""Program: a model on a mesh, with the partition of its state.

A `Layout` consists of axes, mesh and partition: it determines the device of
each rank, and the part of a worker's state that each rank holds. A `Program` is
a model with a layout; training steps, evaluations and ledgers are built from
it. The state that a run updates at each step is in `caatnet.train.state`.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from caatnet.models.access import Access, mark_read_dtypes
from caatnet.models.checks import check, check_scores, is_parameter
from caatnet.models.protocol import Model, Parameter
from caatnet.stages import Stages
from parallel.axes import Axis
from parallel.ledger.compiler_options import of_device
from parallel.memory.offload import ON_DEVICE, ActivationPlacement
from parallel.plans.axis_kinds import kind
from parallel.plans.zero import cost
from parallel.plans.zero.partition import Partition
from parallel.zero.gathered import GatheredAccess
from parallel.zero.shards import MeshPartition, TensorSpec


@dataclasses.dataclass(frozen=True)
class Layout:
  """Placement of a model: its axes, the mesh, and the partition of its state.

  Attributes:
    axes: All axes, outermost first, of the kinds in
      `parallel.plans.axis_kinds`.
    mesh: Devices, with one mesh axis per axis.
    partition: ZeRO partition: the number of innermost levels over which each of
      weights, gradients and optimizer state is sharded.
    kernels: Implementations of norms and codecs in order of preference, as in
      `parallel.kernels.selection`.
    prefetch: Whether a layer's weights are gathered while the previous layer
      runs.
    moments: Memory kind of the optimizer's moments between steps, "device" or
      "pinned_host".
    activations: Activations that layers save for their backward, and their
      memory.
    stages: Stages of a pipeline; None if every rank runs the whole model.
    xla_options: Pairs (name, value) of XLA options, which extend or override
      the default options for the kind of device.
  """

  axes: tuple[Axis, ...]
  mesh: Mesh
  partition: Partition
  kernels: tuple[str, ...] = ("reference",)
  prefetch: bool = False
  moments: str = "device"
  activations: ActivationPlacement = ON_DEVICE
  stages: Stages | None = None
  xla_options: tuple[tuple[str, bool | str], ...] = ()

  @functools.cached_property
  def worker(self) -> Axis:
    """Axis of workers, each with its own parameters."""
    (found,) = (x for x in self.axes if kind(x.name).parameters == "own")
    return found

  @functools.cached_property
  def data(self) -> tuple[Axis, ...]:
    """Axes of data-parallel ranks within a worker, outermost first."""
    return tuple(x for x in self.axes if kind(x.name).is_data)

  @functools.cached_property
  def model_axes(self) -> tuple[Axis, ...]:
    """Axes whose ranks see the same examples: stages, if any, and tensor."""
    return tuple(x for x in self.axes if not kind(x.name).examples)

  @functools.cached_property
  def tensor(self) -> Axis:
    """Tensor axis."""
    (found,) = (x for x in self.axes if x.name == "tensor")
    return found

  @functools.cached_property
  def sliced_axes(self) -> tuple[Axis, ...]:
    """Axes that specs of a model may name; stages are not among them."""
    return tuple(
      x for x in self.axes if kind(x.name).parameters == "slices"
      and not (self.stages and x == self.stages.axis)
    )

  @property
  def rank_names(self) -> tuple[str, ...]:
    """Names of the mesh axes over one worker's ranks, outermost first."""
    return tuple(axis.name for axis in self.axes if axis != self.worker)

  @property
  def on_cpu(self) -> bool:
    """Whether the devices are CPUs."""
    return self.mesh.devices.flat[0].platform == "cpu"

  @property
  def ordered(self) -> bool:
    """Whether collectives need a fixed order, as between several CPU devices.

    Without it, CPU devices can deadlock (`parallel.collectives.order_after`).
    """
    return self.on_cpu and self.mesh.size > 1

  def compiler_options(self, in_pieces: bool = False) -> dict[str, bool | str]:
    """Returns the XLA options with which a step is compiled.

    Args:
      in_pieces: Whether the step is split into nano-batches.
    """
    options = of_device(self.mesh.devices.flat[0], in_pieces)
    options |= dict(self.xla_options)
    return {name: value for name, value in options.items() if value != ""}

  @property
  def num_data_ranks(self) -> int:
    """Number of data-parallel ranks of one worker."""
    return self.partition.num_ranks

  @functools.cached_property
  def shards(self) -> MeshPartition | None:
    """ZeRO partition on the mesh; None if each rank holds the whole state."""
    if not self.partition.optimizer:
      return None
    return MeshPartition(self.partition, self.data, self.ordered, self.kernels)

  @property
  def access(self) -> Access | GatheredAccess:
    """Access through which the model reads its parameters in training."""
    if self.shards is None:
      return Access(activations=self.activations)
    return GatheredAccess(self.shards, self.prefetch, self.activations)

  @property
  def batch_spec(self) -> P:
    """``PartitionSpec`` of batches ``[workers, *levels, B, ...]``."""
    return P(*(x.name for x in self.axes if kind(x.name).examples))

  @property
  def batch_dims(self) -> tuple[int, ...]:
    """Logical sizes of a batch's dims before B: workers, then levels."""
    return tuple(x.size for x in self.axes if kind(x.name).examples)

  def add_worker_dim(self, specs: Any) -> Any:
    """Returns the specs of arrays to which a leading worker dim is added."""
    return jax.tree.map(
      lambda spec: P(self.worker.name, *spec), specs, is_leaf=is_spec
    )

  def shardings(self, specs: Any) -> Any:
    """Returns a tree of specs as a tree of ``NamedSharding`` on this mesh."""
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec
    )


class Leaf(NamedTuple):
  """A parameter, or its moment, in its logical and in its stored form.

  Attributes:
    parameter: Declaration in the model.
    shape: Logical shape, including layers and tensor ranks.
    tensor: Dims that a ZeRO partition shards, and the dtype; None for moments
      that it does not shard.
    num_stored_dims: Number of dims of one worker's stored array.
  """

  parameter: Parameter
  shape: tuple[int, ...]
  tensor: TensorSpec | None
  num_stored_dims: int


class SplitParams(NamedTuple):
  """Parts of a nested dict with the paths of parameters.

  Attributes:
    trained: Nested dict of the trained parameters.
    explicit: Nested dict of the explicit training state, {} if there is none.
  """

  trained: Any
  explicit: Any

  def join(self) -> Any:
    """Returns one nested dict of both, with the keys in order."""

    def join(a: Any, b: Any) -> Any:
      if not isinstance(a, dict):
        return a
      return {
        key: join(a[key], b[key]) if key in a and key in b
        else a[key] if key in a else b[key] for key in sorted({**a, **b})
      }

    return join(self.trained, self.explicit) if self.explicit else self.trained


@dataclasses.dataclass(frozen=True)
class Program:
  """Model on a layout: shapes, specs and initialisation of its parameters.

  Attributes:
    model: Architecture and sizes.
    layout: Axes, mesh and partition.
    moments: Name and shape of each array that the inner optimizer has for a
      parameter (`caatnet.schema.optimizer.Moments`).

  Raises:
    ValueError: The model's `parameters` or `stacks` contradict its `init`, or
      a parameter is cut over data-parallel ranks that share a device.
  """

  model: Model
  layout: Layout
  moments: tuple[tuple[str, str], ...] = (("mu", "same"), ("nu", "same"))

  def __post_init__(self) -> None:
    check(self.model, self._init_shapes, self.layout.sliced_axes)
    _ = self._unpartitioned_shapes  # sizes that do not fit fail here
    for axis in self.layout.data:
      # Functions of a rank's examples are mapped over the ranks of a device,
      # which would have to read different slices.
      if axis.lanes > 1 and any(
        axis.name in tensor.apart for tensor in jax.tree.leaves(self.tensors)
      ):
        raise ValueError(
          f"parameters are cut over the data-parallel axis {axis}: it needs as "
          "many devices as ranks"
        )

  def readable(self, params: Any) -> Any:
    """Returns parameters marked with the dtypes in which the model reads them.

    Args:
      params: One worker's stored arrays, without a partition: all parameters,
        or those of some top-level keys.
    """
    parameters = self.model.parameters
    return mark_read_dtypes(params, {key: parameters[key] for key in params})

  def checked(self, scores: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the model's scores after checking their types during tracing."""
    check_scores(self.model, scores, self.layout.tensor)
    return scores

  @functools.cached_property
  def leaves(self) -> Any:
    """Tree of `Leaf`, one per parameter."""
    return jax.tree.map(
      lambda p, x, tensor, stored: Leaf(p, x.shape, tensor, stored.ndim),
      self.model.parameters, self._init_shapes, self.tensors,
      self.stored_shapes, is_leaf=is_parameter,
    )

  @functools.cached_property
  def _init_shapes(self) -> Any:
    """Shapes of one worker's parameters as the model initialises them."""
    return jax.eval_shape(self.model.init, jax.random.key(0))

  @functools.cached_property
  def _unpartitioned_shapes(self) -> Any:
    """Logical shapes of one worker's parameters, split over stages only."""
    if self.layout.stages is None:
      return self._init_shapes
    return jax.eval_shape(self._init_unpartitioned, jax.random.key(0))

  def _init_unpartitioned(self, key: jax.Array) -> Any:
    """Initializes one worker's parameters, split over stages only."""
    whole = self.model.init(key)
    stages = self.layout.stages
    if stages is None:
      return whole

    def cut(p: Parameter, x: jax.Array) -> jax.Array:
      return x if p.stage_dim is None else stages.store(x, p.stage_dim)

    return jax.tree.map(
      cut, self.model.parameters, whole, is_leaf=is_parameter
    )

  @functools.cached_property
  def _parameters(self) -> Any:
    """Tree of `Parameter`; with stages, specs have one more leading dim."""
    stages = self.layout.stages
    if stages is None:
      return self.model.parameters

    def with_stages(p: Parameter) -> Parameter:
      if p.stage_dim is None:
        return p
      return dataclasses.replace(
        p, spec=P(stages.axis.name, *p.spec), num_lead=p.num_lead + 1
      )

    return jax.tree.map(
      with_stages, self.model.parameters, is_leaf=is_parameter
    )

  def _map(self, f: Callable[..., Any], *trees: Any) -> Any:
    """Maps ``f(parameter, leaf, ...)`` over all parameters of the model."""
    return jax.tree.map(f, self._parameters, *trees, is_leaf=is_parameter)

  @functools.cached_property
  def tensors(self) -> Any:
    """Each parameter's `TensorSpec`: dims without layers and ranks, dtype."""
    data = {axis.name for axis in self.layout.data}
    return self._map(
      lambda p, x: TensorSpec(
        x.shape[p.num_lead :], p.dtype, p.tensor_form,
        tuple(name for name in p.spec if name in data),
      ),
      self._unpartitioned_shapes
    )

  @property
  def decays(self) -> Any:
    """Tree of booleans: whether weight decay applies to trained parameters."""
    return self.split(self._map(lambda p: p.decays)).trained

  @functools.cached_property
  def trained_shapes(self) -> Any:
    """Logical shapes of one worker's stored trained parameters."""
    return self.split(self.stored_shapes).trained

  @property
  def has_explicit_state(self) -> bool:
    """Whether the model has explicit training state."""
    return bool(self.split(self.model.parameters).explicit)

  def split(self, tree: Any) -> "SplitParams":
    """Splits a tree of all parameters into trained ones and explicit state."""

    def part(declared: Any, tree: Any, explicit: bool) -> Any:
      if is_parameter(declared):
        return tree if bool(declared.update) == explicit else None
      found = {
        key: part(declared[key], tree[key], explicit) for key in tree
      }
      return {k: x for k, x in found.items() if x is not None} or None

    whole = self.model.parameters
    return SplitParams(
      part(whole, tree, False), part(whole, tree, True) or {}
    )

  @property
  def unpartitioned_specs(self) -> Any:
    """Tree of specs of one worker's unpartitioned parameters."""
    return self._map(lambda p: p.spec)

  @functools.cached_property
  def specs(self) -> Any:
    """Tree of specs of one worker's stored parameters."""
    layout = self.layout
    if layout.shards is None:
      return self.unpartitioned_specs
    # The optimizer's state has the finest partition, and parameters are stored
    # like it.
    def spec(p: Parameter, tensor: TensorSpec) -> P:
      own = layout.shards.of_tensor(tensor)
      levels = [x.name for x in own.inner[: own.partition.optimizer]]
      # Stored: [*lead, ranks of the levels innermost first, elements of a
      # shard]. A spec may end before the last leading dim, so it is padded.
      return P(*p.spec, *[None] * (p.num_lead - len(p.spec)), *levels)

    return self._map(spec, self.tensors)

  @property
  def cost_parameters(self) -> list[cost.Parameter]:
    """Parameters on one device, as input of `parallel.plans.zero.cost`."""

    moments = sum(shape == "same" for _, shape in self.moments)

    def parameter(
      p: Parameter, x: jax.ShapeDtypeStruct, tensor: TensorSpec
    ) -> cost.Parameter:
      # Number of such tensors on one device: one per layer and lane.
      count = math.prod(x.shape[: p.num_lead])
      for axis in self.layout.axes:
        if axis.name in p.spec:
          count //= axis.devices  # tensors on other devices do not count
      return cost.Parameter(
        tensor.size, count, jnp.dtype(p.dtype).itemsize, uses=p.uses,
        regathered=p.regathered, moments=0 if p.update else moments,
        form=tensor.form, apart=tensor.apart, unit=tensor.unit,
      )

    return jax.tree.leaves(
      self._map(parameter, self._unpartitioned_shapes, self.tensors)
    )

  @property
  def local_shapes(self) -> Any:
    """Shapes of one worker's stored parameters on one device."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype),
      self.stored_shapes,
      self.layout.shardings(self.specs),
    )

  @functools.cached_property
  def stored_shapes(self) -> Any:
    """Logical shapes of one worker's stored parameters."""
    return jax.eval_shape(self.init_params, jax.random.key(0))

  def init_params(self, key: jax.Array) -> Any:
    """Initializes one worker's parameters from a key, in stored form."""
    whole = self._init_unpartitioned(key)
    if self.layout.shards is None:
      return whole
    return jax.tree.map(self.layout.shards.store, whole, self.tensors)

  def specs_like_params(self, tree: Any) -> Any:
    """Returns the specs of a tree whose leaves are sharded like parameters.

    Args:
      tree: A tree such as an optimizer's state. A leaf whose path ends with the
        path of a parameter is sharded like it, in the dims that it shares with
        the parameter (`moment_shape`). All other leaves are replicated.
    """
    find = make_suffix_lookup(self._map(
      lambda p, spec: (spec, p.num_lead), self.specs
    ), is_leaf=lambda x: isinstance(x, tuple))

    def spec(path: tuple[Any, ...], _: Any) -> P:
      found = find(path)
      if found is None:
        return P()
      whole, num_lead = found
      sharded = self.moment_shape(path) in ("same", "row")
      return whole if sharded else P(*whole[:num_lead])

    return jax.tree.map_with_path(spec, tree)

  def moment_shape(self, path: tuple[Any, ...]) -> str:
    """Returns the shape, by `moments`, of an array of an optimizer's state.

    ``path`` ends with the path of the array's parameter.
    """
    names = {name.removeprefix(".") for name in _names(path)}
    return next(
      (shape for name, shape in self.moments if name in names), "same"
    )

  def make_leaf_lookup(self) -> Callable[[tuple[Any, ...]], Leaf | None]:
    """Returns a function from the path of an array to its `Leaf`.

    Paths are those of a training state. The function returns None for an array
    that belongs to no parameter, such as a step count.
    """
    find = make_suffix_lookup(
      self.leaves, is_leaf=lambda x: isinstance(x, Leaf)
    )

    def find_leaf(path: tuple[Any, ...]) -> Leaf | None:
      leaf, shape = find(path), self.moment_shape(path)
      if leaf is None or shape == "same":
        return leaf
      tensor, num_lead = leaf.tensor, leaf.parameter.num_lead
      if self.layout.stages and (leaf.parameter.stage_dim or 0) >= num_lead > 0:
        raise ValueError(
          f"moments {shape!r} of a parameter whose dim "
          f"{leaf.parameter.stage_dim} is cut over stages"
        )
      lead = leaf.shape[:num_lead]
      num_rest = leaf.num_stored_dims - (
        len(tensor.shape) if self.layout.shards is None else 1
      )  # dims before the tensor's
      if shape == "row":
        of_rows = dataclasses.replace(
          tensor, shape=tensor.shape[:1],
          form="flat" if tensor.form == "rows" else tensor.form,
        )
        return leaf._replace(
          shape=(*lead, *of_rows.shape), tensor=of_rows,
          num_stored_dims=num_rest + 1,
        )
      # Only the number of dims of a low-rank factor matters.
      kept = {
        "column": tensor.shape[1:], "low_rank": (0, 0), "scalar": ()
      }[shape]
      own = self.layout.shards and self.layout.shards.of_tensor(tensor)
      num_levels = own.partition.optimizer if own else 0
      return leaf._replace(
        shape=(*lead, *kept), tensor=None,
        num_stored_dims=num_rest - num_levels + len(kept),
      )

    return find_leaf


def is_spec(x: Any) -> bool:
  """Returns whether ``x`` is a leaf of a tree of specs."""
  return isinstance(x, P)


def make_suffix_lookup(
  of_parameters: Any, is_leaf: Callable[[Any], bool] = is_spec
) -> Callable[[tuple[Any, ...]], Any]:
  """Returns a function that finds the parameter that a path ends with.

  States of optimizers and outer loops contain trees like the parameters: the
  momentum of blocks/w_out has the path mu/blocks/w_out. A path belongs to the
  parameter whose own path is its suffix.

  Args:
    of_parameters: A tree with one leaf per parameter.
    is_leaf: Returns whether an object is a leaf of ``of_parameters``, for
      leaves that are themselves trees.

  Returns:
    A function of a path that returns the leaf of its parameter, or None if the
    path belongs to no parameter.

  Example:
    >>> find = make_suffix_lookup({"blocks": {"w_out": P(None, "tensor")}})
    >>> key = jax.tree_util.DictKey
    >>> tuple(find((key("mu"), key("blocks"), key("w_out"))))
    (None, 'tensor')
    >>> find((key("count"),)) is None
    True
  """

  leaves = {
    _names(path): leaf
    for path, leaf in jax.tree.leaves_with_path(of_parameters, is_leaf=is_leaf)
  }

  def find(path: tuple[Any, ...]) -> Any:
    ends = (_names(path)[i:] for i in range(len(path)))  # longest suffix first
    return next((leaves[end] for end in ends if end in leaves), None)

  return find


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
  """Returns the keys of a path as strings; attributes begin with a dot."""
  # Keys of dicts and attributes of named tuples have different types.
  return tuple(str(getattr(key, "key", key)) for key in path)
