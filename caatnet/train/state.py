"""What a training run carries from step to step, and where it lives."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from caatnet.models.config import TransformerConfig
from caatnet.models.transformer import Transformer, partition_specs
from parallel.axes import Axis
from parallel.collectives import varying
from parallel.outer.base import OuterLoop, stacked
from parallel.zero import cost
from parallel.zero.partition import Partition
from parallel.zero.shards import Shards, Tensor


class TrainState(NamedTuple):
  """Logical arrays: their shapes know ranks and workers, not devices.

  Attributes:
    step: int32 scalar, updates done so far.
    params: Nested dict of float32 arrays ``[workers, ...]``.
    opt_state: The optimizer's state, all leaves ``[workers, ...]``.
    outer: What the outer loop carries.
    key: The run's random key (raw uint32 data), for what a step may draw.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  outer: Any
  key: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
  """A model on a mesh: what the step, the evaluation and the ledger share.

  Attributes:
    config: The model's sizes.
    worker: The axis of workers, each with parameters of its own.
    data: The levels of data-parallel ranks within a worker, outermost first.
    tensor: The tensor axis.
    mesh: Carries all of them.
    partition: Which of the levels has which part of a worker's state.
    offload: Whether the optimizer's state waits in the host's memory.
    prefetch: Whether a layer's weights are gathered beside the layer before.
  """

  config: TransformerConfig
  worker: Axis
  data: tuple[Axis, ...]
  tensor: Axis
  mesh: Mesh
  partition: Partition
  offload: bool = False
  prefetch: bool = False

  def __post_init__(self) -> None:
    _ = self._abstract  # sizes that do not fit fail here

  @functools.cached_property
  def _abstract(self) -> tuple[Any, Any]:
    return nnx.split(
      nnx.eval_shape(
        lambda: Transformer(self.config, self.tensor, nnx.Rngs(0))
      )
    )

  @property
  def graph(self) -> Any:
    """The model without its parameters, for ``nnx.merge``."""
    return self._abstract[0]

  @property
  def axes(self) -> tuple[Axis, ...]:
    """All of them, outermost first."""
    return (self.worker, *self.data, self.tensor)

  @property
  def on_cpu(self) -> bool:
    """Whether collectives need an order; see ``collectives.after``."""
    return self.mesh.devices.flat[0].platform == "cpu"

  @property
  def shards(self) -> Shards | None:
    """The partition on the mesh; None if every data rank has everything."""
    if not self.partition.optimizer:
      return None
    return Shards(
      self.partition, self.data, self.on_cpu, self.config.kernels
    )

  @functools.cached_property
  def tensors(self) -> Any:
    """A `Tensor` for each parameter: the dims after layers and ranks."""

    def tensor(path, x, spec):
      # Matrices in the activations' dtype; gains stay float32.
      is_matrix = self.tensor.name in spec
      lead = (_names(path)[0] == "blocks") + is_matrix
      dtype = self.config.dtype if is_matrix else "float32"
      return Tensor(x.shape[lead:], dtype)

    return jax.tree.map_with_path(tensor, self._shapes, self.whole_specs)

  @property
  def parameters(self) -> list[cost.Parameter]:
    """What a partition's cost depends on: one device's parameters."""

    def parameter(path, x, spec, tensor):
      lead = math.prod(x.shape[: x.ndim - len(tensor.shape)])
      if self.tensor.name in spec:
        lead //= self.tensor.devices
      looked_up = _names(path)[0] == "embedding"
      tied = looked_up and self.config.tied_embeddings
      return cost.Parameter(
        tensor.size, lead, jnp.dtype(tensor.dtype).itemsize,
        uses=2 if tied else 1, regathered=1 if tied or not looked_up else 0,
      )

    tree = jax.tree.map_with_path(
      parameter, self._shapes, self.whole_specs, self.tensors
    )
    return jax.tree.leaves(tree)

  @property
  def whole_specs(self) -> Any:
    """A ``PartitionSpec`` per parameter of one worker, not partitioned."""
    return partition_specs(self._abstract[1], self.tensor.name)

  @property
  def specs(self) -> Any:
    """A ``PartitionSpec`` per parameter of one worker as it is stored."""
    if self.shards is None:
      return self.whole_specs
    levels = [a.name for a in self.shards.inner[: self.partition.optimizer]]
    return jax.tree.map(
      lambda x, spec, tensor: P(
        *spec, *[None] * (len(x.shape) - len(tensor.shape) - len(spec)),
        *levels,
      ),
      self._shapes, self.whole_specs, self.tensors,
    )

  @functools.cached_property
  def _shapes(self) -> Any:
    return jax.eval_shape(self.init_whole_params, jax.random.key(0))

  @property
  def local_params(self) -> Any:
    """Shapes of one worker's parameters as they lie on one device."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype),
      jax.eval_shape(self.init_params, jax.random.key(0)),
      self.shardings(self.specs),
    )

  @property
  def batch_spec(self) -> P:
    """Of batches ``[workers, *levels, B, T + 1]``."""
    return P(self.worker.name, *(axis.name for axis in self.data))

  @property
  def num_data_ranks(self) -> int:
    """Data-parallel ranks of one worker."""
    return self.partition.num_ranks

  def init_whole_params(self, key: jax.Array) -> Any:
    """The parameters that belong to a seed, whatever mesh and partition."""
    model = Transformer(self.config, self.tensor, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.split(model)[1])

  def init_params(self, key: jax.Array) -> Any:
    """The same, as they are stored."""
    whole = self.init_whole_params(key)
    if self.shards is None:
      return whole
    return jax.tree.map(self.shards.store, whole, self.tensors)

  def state_specs(
    self, optimizer: optax.GradientTransformation, outer: OuterLoop
  ) -> TrainState:
    """A ``PartitionSpec`` for each leaf of the training state."""
    params = jax.eval_shape(self.init_params, jax.random.key(0))
    return TrainState(
      step=P(),
      params=self.per_worker(self.specs),
      opt_state=self.per_worker(
        self._specs_of(jax.eval_shape(optimizer.init, params))
      ),
      outer=self.outer_specs(outer),
      key=P(),
    )

  def state_shardings(
    self, optimizer: optax.GradientTransformation, outer: OuterLoop
  ) -> TrainState:
    """Where each leaf of the training state is between steps."""
    shardings = self.shardings(self.state_specs(optimizer, outer))
    if not self.offload:
      return shardings
    on_host = jax.tree.map(
      lambda sharding: sharding.with_memory_kind("pinned_host"),
      shardings.opt_state,
    )
    return shardings._replace(opt_state=on_host)

  def outer_specs(self, outer: OuterLoop) -> Any:
    """A ``PartitionSpec`` for each leaf of the outer loop's state."""
    params = jax.eval_shape(self.init_params, jax.random.key(0))
    specs = self._specs_of(jax.eval_shape(outer.init, params))
    if "workers" in specs:
      specs["workers"] = self.per_worker(specs["workers"])
    return specs

  def per_worker(self, specs: Any) -> Any:
    """Specs of the same arrays with a leading worker dim."""
    return jax.tree.map(
      lambda spec: P(self.worker.name, *spec), specs, is_leaf=is_spec
    )

  def _specs_of(self, tree: Any) -> Any:
    """A leaf whose path ends like a parameter's lives where that one does."""
    find = by_end_of_path(self.specs)
    return jax.tree.map_with_path(
      lambda path, _: P() if (spec := find(path)) is None else spec, tree
    )

  def shardings(self, specs: Any) -> Any:
    """The same tree with ``NamedSharding`` on this mesh."""
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec),
      specs,
      is_leaf=is_spec,
    )


def is_spec(x: Any) -> bool:
  """Whether ``x`` is a leaf of a tree of specs."""
  return isinstance(x, P)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(str(getattr(key, "key", key)) for key in path)


def by_end_of_path(of_parameters: Any) -> Callable[[tuple[Any, ...]], Any]:
  """Finds the parameter like whose path another one ends; None if none."""
  leaves = {
    _names(path): leaf
    for path, leaf in jax.tree.leaves_with_path(of_parameters, is_leaf=is_spec)
  }

  def find(path):
    names = _names(path)
    ends = (names[i:] for i in range(len(names)))
    return next((leaves[end] for end in ends if end in leaves), None)

  return find


def init_state(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
  seed: int,
) -> TrainState:
  """The first state, laid out on the program's mesh.

  Args:
    program: Model and mesh.
    optimizer: Gives each worker's first optimizer state.
    outer: Gives the outer loop's first state.
    seed: Decides the parameters, the same for all workers.
  """

  def init() -> TrainState:
    params_key, run_key = jax.random.split(jax.random.key(seed))
    params = program.init_params(params_key)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=stacked(params, program.worker),
      opt_state=stacked(optimizer.init(params), program.worker),
      outer=outer.init(params),
      key=jax.random.key_data(run_key),
    )

  shardings = program.state_shardings(optimizer, outer)
  return jax.jit(init, out_shardings=shardings)()


def check_equal_start(program: Program, params: Any) -> None:
  """Compares a hash of every worker's parameters with worker 0's.

  Args:
    program: Where they are.
    params: ``[workers, ...]``.

  Raises:
    ValueError: A worker has others: averages would mix unrelated models.
  """

  def digest(params):  # uint32 [W]
    names = (*(axis.name for axis in program.data), program.tensor.name)

    def of(x):
      bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
      bits = bits.reshape(x.shape[0], -1)
      weights = 2 * jnp.arange(bits.shape[1], dtype=jnp.uint32) + 1
      # A replica counts once per device, for all workers alike.
      return varying(jnp.sum(bits * weights, axis=1), *names)

    return jax.lax.psum(sum(map(of, jax.tree.leaves(params))), names)

  digests = jax.jit(
    jax.shard_map(
      digest,
      mesh=program.mesh,
      in_specs=(program.per_worker(program.specs),),
      out_specs=P(program.worker.name),
    ),
    out_shardings=program.shardings(P()),
  )(params)
  for worker, value in enumerate(np.asarray(digests)):
    if value != digests[0]:
      raise ValueError(
        f"worker {worker} starts from other parameters than worker 0 (hashes "
        f"{int(value):08x}, {int(digests[0]):08x}): do all processes have the "
        "same config, seed and versions?"
      )
