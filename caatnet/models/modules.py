"""Parameters of models that are a sequence of NNX modules."""

import abc
import collections
from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import nnx
import jax
from jax.sharding import PartitionSpec as P

from caatnet.models.protocol import Parameter, Reduction


class SequentialModel(abc.ABC):
  """Base class of models that are a sequence of NNX modules.

  It defines a part of `caatnet.models.protocol.Model`. The parameters are a
  dict from each module's name to its parameters. There is one tensor rank. A
  subclass defines `_makers`, and ``stacks`` if a module is a stack of layers.
  """

  dtype: str

  @abc.abstractmethod
  def _makers(self) -> dict[str, Callable[[nnx.Rngs], nnx.Module]]:
    """Returns each module's constructor by name, in forward order.

    The parameters of a stack of layers must be ``[layers, ...]``.
    """

  @property
  def stacks(self) -> Mapping[str, int]:
    return {}

  @functools.cached_property
  def _graphdefs(self) -> dict[str, Any]:
    """Graph definition of each module, by name, in forward order."""
    return {
      name: nnx.split(nnx.eval_shape(lambda make=make: make(nnx.Rngs(0))))[0]
      for name, make in self._makers().items()
    }

  @property
  def num_params(self) -> int:
    shapes = jax.eval_shape(self.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))

  @property
  def parameters(self) -> Any:
    """Tree of `Parameter`; all except kernels are float32 without decay."""

    def parameter(path: tuple[Any, ...], _: Any) -> Parameter:
      is_kernel, stacked = path[-1].key == "kernel", path[0].key in self.stacks
      return Parameter(
        P(), num_lead=int(stacked),
        dtype=self.dtype if is_kernel else "float32", decays=is_kernel,
        stage_dim=0 if stacked else None,
      )

    shapes = jax.eval_shape(self.init, jax.random.key(0))
    return jax.tree.map_with_path(parameter, shapes)

  def init(self, key: jax.Array) -> Any:
    rngs = nnx.Rngs(params=key)
    return {
      name: nnx.to_pure_dict(nnx.split(make(rngs))[1])
      for name, make in self._makers().items()
    }

  def reductions(
    self,
    example: Any,
    *,
    batch_size: int,
    data_lanes: int,
    accumulation: int = 1,
  ) -> collections.Counter[Reduction]:
    """Returns an empty counter, since one tensor rank reduces nothing."""
    return collections.Counter()
