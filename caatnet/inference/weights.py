"""Parameters as inference stores them, and how a model reads them."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from caatnet.models.access import AS_THEY_ARE, Access, Policy
from caatnet.models.protocol import Parameter
from caatnet.program import Program


class LayersApart(Access):
  """Reads layers that are arrays of their own, one after another.

  XLA:CPU copies a layer's weights out of a stack before it multiplies by them,
  which takes longer than the products of a step with few tokens.
  """

  def scan(
    self,
    f: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    unroll: int,
    policy: Policy,
  ) -> Any:
    for layer in params:
      x = f(layer, x)
    return x


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters, and all that a program must know of them.

  Attributes:
    params: The parameters, in the dtypes in which the model reads them; arrays
      or their shapes.
    specs: Their specs.
    access: How the model's functions read them.
  """

  params: Any
  specs: Any
  access: Access


def make_weights(program: Program, params: Any, apart: bool) -> Weights:
  """Casts parameters to what the model reads.

  Args:
    program: The model on a mesh, without a partition.
    params: float32 parameters as training stores them; they are donated.
    apart: Whether each layer gets arrays of its own.
  """
  specs = program.whole_specs
  dtypes = jax.tree.map(
    lambda p: p.dtype, program.model.parameters,
    is_leaf=lambda x: isinstance(x, Parameter),
  )
  stacks = program.model.stacks if apart else {}

  def convert(params):
    params = jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)
    return params | {
      name: tuple(
        jax.tree.map(lambda x, i=i: x[i], params[name]) for i in range(layers)
      )
      for name, layers in stacks.items()
    }

  specs = specs | {
    name: tuple(
      jax.tree.map(lambda s: P(*s[1:]), specs[name], is_leaf=_is_spec)
      for _ in range(layers)
    )
    for name, layers in stacks.items()
  }
  convert = jax.jit(
    convert, out_shardings=program.layout.shardings(specs), donate_argnums=0
  )
  return Weights(
    convert(params), specs, LayersApart() if apart else AS_THEY_ARE
  )


def _is_spec(x: Any) -> bool:
  return isinstance(x, P)
