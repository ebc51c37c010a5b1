"""Every GPU kernel through Triton, for GPUs that are not here."""

import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from caatnet import build
from configs.caatnet import tiny
from parallel.axes import Axis, make_mesh
from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.xla import targets

TARGETS = ("gpu:a100:1x1", "gpu:h200:1x1", "gpu:b200:1x1")


@functools.cache
def mesh_of(target):
  found = targets.resolve(target).devices
  return make_mesh({"tensor": Axis("tensor", 1)}, list(found))


def compiled(f, target, *operands):
  """Under ``shard_map`` with checked varying axes, as the models run it."""
  mesh = mesh_of(target)
  operands = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    for x in operands
  ]

  def body(*operands):
    operands = [jax.lax.pcast(x, "tensor", to="varying") for x in operands]
    return jax.tree.map(lambda x: x[None], f(*operands))

  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=P(), out_specs=P("tensor")
  )
  return jax.jit(mapped).lower(*operands).compile()


def shapes(*pairs):
  return [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in pairs]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
  "case", [*add_norm_cases.CASES.values(), *add_norm_cases.LARGE.values()],
  ids=str,
)
def test_add_norm(target, case):
  n, width, dtype = case.rows, case.shared + case.private, case.dtype
  parts = shapes(((n, case.shared), dtype), ((n, case.private), dtype))
  gain, normed = shapes(((width,), "float32"), ((n, width), dtype))
  updates = parts if case.update else []

  def both(*operands):
    cotangents = operands[-3:]
    *stream, gain = operands[:-3]
    stream = (*stream, None, None)[:4]

    def run(*stream_and_gain):
      return add_norm.add_norm(
        *stream_and_gain, private_scale=case.private_scale,
        implementation="gpu",
      )

    out, transpose = jax.vjp(run, *stream, gain)
    return out, [g for g in transpose(cotangents) if g is not None]

  text = compiled(
    both, target, *parts, *updates, gain, *parts, normed
  ).as_text()
  assert "add_norm_backward" in text


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_models_use_the_kernels(p):
  config = build.override(
    tiny.get_config("demo"), f"parallel.tensor=4 model.p={p}"
  )
  devices = list(targets.resolve("gpu:h200:1x4").devices)
  text = build.build(config, None, devices).lower_step().as_text()
  # Forward and backward of two norms in a block and one at the head.
  assert text.count('name = "add_norm"') == 3
  assert text.count('name = "add_norm_backward"') == 3
