"""Parameters as inference stores them, and how a model reads them."""

from collections.abc import Callable
import dataclasses
from typing import Any
import warnings

import jax
from jax.sharding import PartitionSpec as P

from caatnet.models.access import AS_THEY_ARE, Access, Policy
from caatnet.models.protocol import Parameter
from caatnet.program import Program, is_spec


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


def make_weights(
  program: Program, params: Any, apart: bool, coded: bool
) -> Weights:
  """Converts parameters to what inference keeps.

  Args:
    program: The model on a mesh, without a partition.
    params: float32 parameters as training stores them; they are donated.
    apart: Whether each layer gets arrays of its own.
    coded: Whether matrices become int8 codes.
  """
  convert, specs, access = _conversion(program, apart, coded)
  convert = jax.jit(
    convert, out_shardings=program.layout.shardings(specs), donate_argnums=0
  )
  with warnings.catch_warnings():
    # What is kept in another dtype cannot take the place of what is donated.
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    return Weights(convert(params), specs, access)


def abstract_weights(program: Program, apart: bool, coded: bool) -> Weights:
  """Returns the same as `make_weights`, with shapes in place of arrays."""
  convert, specs, access = _conversion(program, apart, coded)
  params = jax.eval_shape(
    convert, jax.eval_shape(program.model.init, jax.random.key(0))
  )
  params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    params, program.layout.shardings(specs),
  )
  return Weights(params, specs, access)


def _conversion(
  program: Program, apart: bool, coded: bool
) -> tuple[Callable[[Any], Any], Any, Access]:
  """Returns what converts parameters, the specs of its result, and an access.
  """
  stacks = program.model.stacks if apart else {}

  def split(tree, cut):
    """Puts a tuple of each layer's parameters in place of a stack."""
    return tree | {
      name: tuple(
        jax.tree.map(lambda x, i=i: cut(x, i), tree[name], is_leaf=is_spec)
        for i in range(layers)
      )
      for name, layers in stacks.items()
    }

  dtypes = jax.tree.map(
    lambda p: p.dtype, program.model.parameters,
    is_leaf=lambda x: isinstance(x, Parameter),
  )

  def convert(params):
    params = jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)
    return split(params, lambda x, i: x[i])

  specs = split(program.whole_specs, lambda spec, i: P(*spec[1:]))
  return convert, specs, LayersApart() if apart else AS_THEY_ARE
