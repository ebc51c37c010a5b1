"""What a training run carries from step to step, and where it lives."""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from caatnet.models.transformer import (
  Transformer,
  TransformerConfig,
  partition_specs,
)
from parallel.axes import Axis


class TrainState(NamedTuple):
  """Logical arrays: their shapes know ranks, not devices.

  Attributes:
    step: int32 scalar, updates done so far.
    params: Nested dict of float32 arrays.
    opt_state: The optimizer's state.
    key: The run's random key (raw uint32 data), for what a step may draw.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  key: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
  """A model on a mesh: what the step, the evaluation and the ledger share.

  Attributes:
    config: The model's sizes.
    data: The data axis.
    tensor: The tensor axis.
    mesh: Carries both.
  """

  config: TransformerConfig
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
    """A ``PartitionSpec`` per parameter."""
    return partition_specs(self._abstract[1], self.tensor.name)

  @property
  def batch_spec(self) -> P:
    """Of batches ``[data shards, B, T + 1]``."""
    return P(self.data.name)

  def init_params(self, key: jax.Array) -> Any:
    """The parameters that belong to a seed, whatever the mesh."""
    model = Transformer(self.config, self.tensor, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.split(model)[1])

  def state_specs(self, optimizer: optax.GradientTransformation) -> TrainState:
    """A ``PartitionSpec`` for each leaf of the training state."""
    params = jax.eval_shape(self.init_params, jax.random.key(0))
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_specs = optax.tree.map_params(
      optimizer,
      lambda _, spec: spec,
      opt_state,
      self.specs,
      transform_non_params=lambda _: P(),
    )
    return TrainState(P(), self.specs, opt_specs, P())

  def shardings(self, specs: Any) -> Any:
    """The same tree with ``NamedSharding`` on this mesh."""
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec),
      specs,
      is_leaf=lambda x: isinstance(x, P),
    )


def init_state(
  program: Program, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
  """The first state, laid out on the program's mesh.

  Args:
    program: Model and mesh.
    optimizer: Gives the optimizer's first state.
    seed: Decides the parameters.
  """

  def init() -> TrainState:
    params_key, run_key = jax.random.split(jax.random.key(seed))
    params = program.init_params(params_key)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(params),
      key=jax.random.key_data(run_key),
    )

  shardings = program.shardings(program.state_specs(optimizer))
  return jax.jit(init, out_shardings=shardings)()
