"""Parameters in the format of inference, and the model's access to them."""

from collections.abc import Callable
import dataclasses
from typing import Any
import warnings

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.models.access import Access, RematPolicy
from caatnet.models.protocol import Parameter
from caatnet.program import Program, is_spec
from parallel.kernels.coded import CodedMatrix


@dataclasses.dataclass(frozen=True)
class InferenceAccess(Access):
  """Access of a model's functions to parameters in the format of inference.

  XLA:CPU and XLA:GPU copy a layer's weights out of a stack before a matrix
  product, which takes longer than the products of a step with few tokens. On
  these platforms each layer has separate arrays.

  Attributes:
    apart: Whether layers are a tuple of each layer's parameters instead of a
      stack.
    few: Whether coded matrices of a device with one lane (one tensor rank) are
      not decoded, since products with few tokens read codes directly
      (`parallel.kernels.coded`).
  """

  apart: bool
  few: bool = False

  def apply(
    self,
    f: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: RematPolicy = None,
  ) -> Any:
    return f(self._read(params), *args)

  def scan(
    self,
    f: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    unroll: int,
    policy: RematPolicy,
  ) -> Any:
    def decoding(layer, x):
      return f(self._read(layer), x)

    if not self.apart:
      return super().scan(decoding, params, x, unroll, policy)
    for layer in params:
      x = decoding(layer, x)
    return x

  def _read(self, params: Any) -> Any:
    """Decodes parameters, except the matrices that `few` leaves as codes."""

    def read(x):
      if not isinstance(x, CodedMatrix) or (self.few and _has_one_lane(x)):
        return x
      return x.decode()

    return jax.tree.map(
      read, params, is_leaf=lambda x: isinstance(x, CodedMatrix)
    )


def _has_one_lane(x: CodedMatrix) -> bool:
  """Returns whether a coded matrix ``[lanes, H, F]`` has one tensor rank."""
  return len(x.shape) == 3 and x.shape[0] == 1


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters with their partition specs and access.

  Attributes:
    params: Parameters in the dtypes in which the model reads them; arrays or
      `jax.ShapeDtypeStruct`.
    specs: Partition specs of the parameters.
    access: Access of the model's functions to the parameters.
  """

  params: Any
  specs: Any
  access: Access


def make_weights(
  program: Program, params: Any, apart: bool, coded: bool
) -> Weights:
  """Converts parameters to the format of inference.

  Args:
    program: The model on a mesh, without a ZeRO partition.
    params: float32 parameters as training stores them; they are donated.
    apart: Whether each layer gets separate arrays.
    coded: Whether matrices are stored as int8 codes, except for embedding
      tables.
  """
  convert, specs, access = make_converter(program, apart, coded)
  convert = jax.jit(
    convert, out_shardings=program.layout.shardings(specs), donate_argnums=0
  )
  with warnings.catch_warnings():
    # A buffer cannot be reused for an array of another dtype.
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    return Weights(convert(params), specs, access)


def abstract_weights(program: Program, apart: bool, coded: bool) -> Weights:
  """Returns `make_weights`'s result with shapes instead of arrays."""
  convert, specs, access = make_converter(program, apart, coded)
  params = jax.eval_shape(
    convert, jax.eval_shape(program.model.init, jax.random.key(0))
  )

  def placed(sharding, tree):  # codes and scales of a matrix are sharded alike
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  shardings = program.layout.shardings(specs)
  return Weights(jax.tree.map(placed, shardings, params), specs, access)


def host_weights(
  program: Program, params: Any, apart: bool, coded: bool
) -> Any:
  """Returns the parameters of `make_weights` as numpy arrays, in host memory.

  Args:
    program: The model on a mesh, without a ZeRO partition.
    params: float32 parameters as training stores them, numpy arrays. Arrays
      whose dtype does not change are not copied.
    apart: Whether each layer gets separate arrays.
    coded: Whether matrices are stored as int8 codes.
  """
  convert, _, _ = make_converter(program, apart, coded)
  return jax.tree.map(np.asarray, convert(params))


def make_converter(
  program: Program, apart: bool, coded: bool
) -> tuple[Callable[[Any], Any], Any, Access]:
  """Returns a converter of parameters, and specs and access of its result.

  The converter accepts jax's and numpy's arrays, and can be traced.
  """
  stacks = program.model.stacks if apart else {}

  def split(tree, cut):
    """Replaces a stack by a tuple of each layer's parameters."""
    return tree | {
      name: tuple(
        jax.tree.map(lambda x, i=i: cut(x, i), tree[name], is_leaf=is_spec)
        for i in range(layers)
      )
      for name, layers in stacks.items()
    }

  def store(p: Parameter, x: jax.Array) -> Any:
    # Only matrices whose one use is a product are coded: looking up rows of an
    # embedding table would decode the whole table.
    product_only = p.decays and p.uses == p.regathered == 1 and not p.update
    if coded and product_only:
      return CodedMatrix.encode(x, p.dtype)
    return x.astype(p.dtype, copy=False)

  def convert(params):
    stored = jax.tree.map(
      store, program.model.parameters, params,
      is_leaf=lambda x: isinstance(x, Parameter),
    )
    return split(stored, lambda x, i: x[i])

  specs = split(program.unpartitioned_specs, lambda spec, i: P(*spec[1:]))
  platform = program.layout.mesh.devices.flat[0].platform
  return convert, specs, InferenceAccess(apart, few=platform == "cpu")
