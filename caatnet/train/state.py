"""What a training run carries from step to step, and where it lives."""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from caatnet.models.transformer import (
  Transformer,
  TransformerConfig,
  partition_specs,
)
from parallel.axes import Axis
from parallel.outer.base import OuterLoop, stacked


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
    data: The data axis, within a worker.
    tensor: The tensor axis.
    mesh: Carries all three.
  """

  config: TransformerConfig
  worker: Axis
  data: Axis
  tensor: Axis
  mesh: Mesh

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
  def specs(self) -> Any:
    """A ``PartitionSpec`` per parameter of one worker."""
    return partition_specs(self._abstract[1], self.tensor.name)

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
    """Of batches ``[workers, data shards, B, T + 1]``."""
    return P(self.worker.name, self.data.name)

  def init_params(self, key: jax.Array) -> Any:
    """The parameters that belong to a seed, whatever the mesh."""
    model = Transformer(self.config, self.tensor, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.split(model)[1])

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
    specs = {
      _names(path): spec
      for path, spec in jax.tree.leaves_with_path(self.specs, is_leaf=is_spec)
    }

    def spec(path, _):
      names = _names(path)
      ends = (names[i:] for i in range(len(names)))
      return next((specs[end] for end in ends if end in specs), P())

    return jax.tree.map_with_path(spec, tree)

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

  shardings = program.shardings(program.state_specs(optimizer, outer))
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
    def of(x):
      bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
      bits = bits.reshape(x.shape[0], -1)
      weights = 2 * jnp.arange(bits.shape[1], dtype=jnp.uint32) + 1
      return jnp.sum(bits * weights, axis=1)

    total = sum(map(of, jax.tree.leaves(params)))
    return jax.lax.psum(total, program.tensor.name)

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
