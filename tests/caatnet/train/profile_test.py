"""Trace of the profiler, of a run whose devices are behind its host."""

import jax
import jax.numpy as jnp

from caatnet.train import loop
from tests.caatnet.train import linear_model as toy


@jax.jit
def late(x):
  """Returns x after about a second of products."""
  rows = jnp.full((256, 256), 1 / 256)
  product = jax.lax.fori_loop(0, 2000, lambda _, y: y @ rows, rows)
  return x + (product.sum() < 0).astype(x.dtype)


def test_trace_ends_after_its_last_step(tmp_path):
  run = loop.Run(toy.make(), tmp_path / "run", "", (0, 1), True)
  late.lower(run.state.step).compile()
  run._profile(0)
  run.state = run.state._replace(step=late(run.state.step))
  run._profile(1)
  assert run.state.step.is_ready()
  run.close()
  assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
