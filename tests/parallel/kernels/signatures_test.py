"""Signatures of operations: declared once, shared by all implementations."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest

from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.codec import api as codec
from parallel.kernels.codec.reference import Codec, OuterOptions
from parallel.kernels.gather_rows import api as gather_rows
from parallel.kernels.paged_attention import api as paged_attention
from parallel.kernels.reduce_add_norm import api as reduce_add_norm

# Operations with kernels for several platforms, and these kernels.
KERNELS = {
  add_norm: add_norm.KERNELS,
  reduce_add_norm: reduce_add_norm.KERNELS,
  codec: codec.KERNELS,
  gather_rows: gather_rows.KERNELS,
  paged_attention: paged_attention.OWN_KERNELS,
}
ROWS = [
  (api, name, platform)
  for api, kernels in KERNELS.items() for platform in kernels
  for name, _ in inspect.getmembers(api.Kernels, inspect.isfunction)
  if not name.startswith("_")
]


def _parameters(function):
  found = inspect.signature(function).parameters.values()
  return {x.name: (x.kind, x.default) for x in found if x.name != "self"}


@pytest.mark.quick
@pytest.mark.parametrize(
  ("api", "name", "platform"), ROWS,
  ids=lambda x: x if isinstance(x, str) else x.__name__.split(".")[-2],
)
def test_kernels_accept_the_parameters_of_the_operation(api, name, platform):
  """Same order and defaults; additional parameters have defaults."""
  declared = getattr(api.Kernels, name)
  kernel = getattr(KERNELS[api][platform], name)
  ours, theirs = _parameters(kernel), _parameters(declared)
  assert [*ours.items()][: len(theirs)] == [*theirs.items()]
  for key in ours.keys() - theirs.keys():
    assert ours[key][1] is not inspect.Parameter.empty, key
  assert "Args:" in declared.__doc__
  assert "Args:" not in kernel.__doc__


@pytest.mark.quick
@pytest.mark.parametrize("operation", [
  "add_norm.add_norm", "reduce_add_norm.reduce_add_norm", "codec.encode",
  "codec.encode_delta", "codec.mean", "codec.total", "codec.decode",
  "codec.nesterov", "paged_attention.paged_attention",
])
def test_reference_accepts_the_parameters_of_the_operation(operation):
  """Except those that select the implementation."""
  room, name = operation.split(".")
  reference, api = (
    getattr(importlib.import_module(f"parallel.kernels.{room}.{part}"), name)
    for part in ("reference", "api")
  )
  theirs = [*_parameters(reference)]
  known = [
    key for key in _parameters(api) if key not in ("implementation", "finite")
  ]
  assert theirs == known
  ours, declared = _parameters(reference), _parameters(api)
  for key, (_, default) in ours.items():
    if default is not inspect.Parameter.empty:
      assert declared[key][1] == default, key
  assert "Args:" in api.__doc__
  assert "Args:" not in reference.__doc__


@pytest.mark.quick
def test_the_named_implementation_runs():
  """Results do not show it: they are those of the reference."""
  x, gain, int8 = jnp.ones((2, 256)), jnp.ones(512), Codec("int8", 128)
  codes = codec.encode(x, int8, implementation="reference")
  many = jax.tree.map(lambda x: jnp.stack([x, x]), codes)
  calls = {
    add_norm.add_norm: (x, x, x, x, gain),
    reduce_add_norm.reduce_add_norm: (x, x, x[None], None, x, gain),
    codec.encode: (x, int8), codec.encode_delta: (x, x, int8),
    codec.mean: (many, 256, int8), codec.total: (many, 256, int8),
    codec.decode: (codes, 256, int8),
    codec.nesterov: (many, x, x, int8, OuterOptions(0.7, 0.9)),
  }
  names = {"tpu_interpret": 1, "gpu_interpret": 1, "reference": 0}
  for function, operands in calls.items():
    for name, kernels in names.items():
      program = jax.make_jaxpr(
        lambda f=function, x=operands, name=name: f(*x, implementation=name)
      )()
      assert str(program).count("pallas_call[") == kernels, (function, name)
