"""Interpreted kernels on at least as many devices as cores."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# On two cores XLA would have two threads, which both devices occupy.
SCRIPT = """
import os, sys

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from launch import options

options._parse(sys.argv, ("config", "cpu_devices"), ())
options._set_up_devices()

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from parallel.kernels.codec import api
from parallel.kernels.codec.reference import Codec

mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
encode = jax.shard_map(
  lambda x: api.encode(x, Codec("int8"), implementation="tpu_interpret"),
  mesh=mesh, in_specs=P("a"), out_specs=P("a"),
)
jax.block_until_ready(jax.jit(encode)(jnp.ones((2, 512))))
"""


def test_exchange_on_as_many_devices_as_cores_terminates():
  """jax 0.10 copies blocks of 100 KiB in a further thread of XLA."""
  result = subprocess.run(
    [sys.executable, "-c", SCRIPT, "--config=configs/caatnet/tiny.py:test",
     "--config.kernels=interpret", "--cpu_devices=2"],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != "NPROC"}
    | {"PYTHONPATH": str(ROOT)},
    capture_output=True, text=True, timeout=100, check=False,
  )
  assert result.returncode == 0, result.stderr
