"""Copies of weights from host memory to a device, in the format of inference.

All sets of weights of a model have equal shapes and shardings. Each copy makes
new buffers. A set that is stored as a difference from a base is copied as the
difference and restored on the device (`caatnet.serving.differences`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from caatnet.inference.weights import (
  Weights,
  abstract_weights,
  host_weights,
  make_converter,
)
from caatnet.program import Program
from caatnet.serving import differences


class WeightUploader:
  """Copier of weight sets of one model to its mesh; safe in several threads.

  Attributes:
    abstract: A set with shapes and shardings instead of arrays.
    size_bytes: Bytes of a set over all devices.
    base_bytes: Bytes of the base of differences over all devices.
  """

  def __init__(self, program: Program, apart: bool, coded: bool) -> None:
    """Prepares copies; programs that restore differences are compiled later.

    Args:
      program: The model on a mesh, without a ZeRO partition.
      apart: Whether each layer gets separate arrays instead of stacked ones.
      coded: Whether matrices are stored as int8 codes.
    """
    self.abstract: Weights = abstract_weights(program, apart, coded)
    self.size_bytes = sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(self.abstract.params)
    )
    self.base_bytes = sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(program.stored_shapes)
    )
    self._program, self._layers = program, (apart, coded)
    self._shardings = jax.tree.map(lambda x: x.sharding, self.abstract.params)
    convert, _, _ = make_converter(program, apart, coded)

    def restore(base, stored, form):
      return convert(differences.restore(base, stored, form))

    # Elementwise operations and products within a rank: without collectives,
    # the program may run in any order relative to steps.
    self._restore = jax.jit(
      restore, static_argnames="form", out_shardings=self._shardings
    )

  def on_host(self, params: Any) -> Any:
    """Returns parameters as numpy arrays in the format of inference.

    Args:
      params: float32 parameters as training stores them, numpy arrays.

    Raises:
      ValueError: The shapes or names are not those of the model.
    """
    self._check(params)
    return host_weights(self._program, params, *self._layers)

  def put(self, weights: Any) -> Any:
    """Returns device arrays with a result of `on_host`; waits for the copy."""
    # A copy even where the device could read numpy's memory, so that a set
    # takes the same memory on each platform.
    return jax.block_until_ready(
      jax.device_put(weights, self._shardings, may_alias=False)
    )

  def put_base(self, params: Any) -> Any:
    """Copies a base's float32 parameters to the device, and waits.

    Raises:
      ValueError: The shapes or names are not those of the model.
    """
    self._check(params)
    specs = self._program.unpartitioned_specs
    shardings = self._program.layout.shardings(specs)
    return jax.block_until_ready(jax.device_put(params, shardings))

  def put_difference(self, base: Any, stored: Any, form: str) -> Any:
    """Copies a difference, restores the weights on the device, and waits.

    Args:
      base: Result of `put_base`; not changed.
      stored: Result of `caatnet.serving.differences.encode`.
      form: Form of the difference.
    """
    specs = _specs_of(stored, self._program.unpartitioned_specs)
    shardings = self._program.layout.shardings(specs)
    return jax.block_until_ready(
      self._restore(base, jax.device_put(stored, shardings), form=form)
    )

  def _check(self, params: Any) -> None:
    """Raises ValueError unless parameters have the model's names and shapes."""
    found, expected = (
      {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
      }
      for tree in (params, self._program.stored_shapes)
    )
    for name in sorted(found.keys() | expected.keys()):
      has, needs = found.get(name), expected.get(name)
      if (
        has is None or needs is None or _format_type(has) != _format_type(needs)
      ):
        raise ValueError(
          f"{name} of the expert is {_format_type(has)}, but the model needs "
          f"{_format_type(needs)}"
        )


def _format_type(x: Any) -> str:
  """Returns dtype and shape of an array as text: "float32[2, 3]"."""
  if x is None:
    return "no parameter"
  return f"{np.dtype(x.dtype).name}{list(x.shape)}"


def _specs_of(stored: Mapping[str, Any], specs: Mapping[str, Any]) -> Any:
  """Returns the partition specs of a difference: those of the parameters.

  All arrays of a parameter begin with its dims of layers and ranks.
  """
  return {
    key: _specs_of(value, specs[key]) if isinstance(value, Mapping)
    else specs[key.partition(":")[0]]
    for key, value in stored.items()
  }
