"""Staged execution over sockets equals the same function on a mesh."""

import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel import quantize
from parallel.axes import Axis, make_mesh
from parallel.collectives import (
  all_gather,
  all_reduce,
  all_to_all,
  permute,
  ranks_here,
  reduce_scatter,
)
from parallel.outer.apart import (
  LoopbackCollectives,
  StagedFunction,
  counting_axis,
)
from parallel.peers.exchange import RoundExchange
from parallel.peers.membership.messages import Reduce
from parallel.wire import Wire
from tests.parallel.peers.worlds import connected, listeners, together

ONE, TENSOR = Axis("worker", 1), Axis("tensor", 2, 2)


def _says(axis, weights):
  """Returns a function of four collectives in a chain of dependencies."""
  def run(args):
    x = args["x"]  # [1, n], cut over the tensor axis
    mean, _ = quantize.coded_mean(
      x, axis, Wire("int8", 4), weights=jnp.asarray(weights)
    )
    x = x - mean[None]
    plain, _ = quantize.coded_mean(x, axis, weights=jnp.asarray(weights))
    ranks = all_gather(ranks_here(axis)[:, None].astype("float32"), axis)
    norm = jax.lax.psum(jnp.sum(jnp.square(x), axis=1), "tensor")
    norms = all_gather(norm[:, None], axis)
    # Products and sums are separate outputs: compilers may fuse them or not.
    return {"x": x + plain[None], "plain": ranks[-1] * plain, "norms": norms}

  return run


def _specs(args):
  where = {"x": P("worker", "tensor"), "plain": P("tensor"), "norms": P()}
  return {key: where[key] for key in args}


def _apart(make, options=None):
  mesh = make_mesh({"worker": ONE, "tensor": TENSOR})
  return StagedFunction(make, mesh, "worker", _specs, options)


@pytest.mark.parametrize("workers", [2, 3])
def test_stages_over_sockets_have_the_bits_of_one_program(workers, same_bits):
  weights = tuple(float(i + 1) for i in range(workers))
  x = np.random.default_rng(0).normal(size=(workers, 16)).astype("f4")
  axis = Axis("worker", workers, workers)
  whole = jax.jit(jax.shard_map(
    _says(axis, weights), mesh=make_mesh({"worker": axis, "tensor": TENSOR}),
    in_specs=({"x": _specs(["x"])["x"]},),
    out_specs=_specs(["x", "plain", "norms"]),
  ), compiler_options=same_bits)({"x": x})
  with listeners(workers) as there:
    links = connected(there)
    task = Reduce(1, 0, tuple(there))
    apart = _apart(_says, same_bits)

    def work(i):
      exchange = RoundExchange(links[i], task, weights[i], ())
      assert exchange.rank == i
      return apart(exchange, {"x": x[i : i + 1]})

    found = together([lambda i=i: work(i) for i in range(workers)])
    for link in links:
      link.close("the end")
  np.testing.assert_array_equal(
    np.concatenate([f["x"] for f in found]), whole["x"]
  )
  for one in found:
    np.testing.assert_array_equal(one["plain"], whole["plain"])
    np.testing.assert_array_equal(one["norms"], whole["norms"])


@pytest.mark.parametrize("verb", [
  lambda x, axis: reduce_scatter(x, axis),
  lambda x, axis: all_to_all(x, axis, split_dim=0, concat_dim=0),
  lambda x, axis: permute(x, axis, [(0, 0)]),
])
def test_collectives_other_than_sums_and_gathers_are_refused(verb):
  apart = _apart(lambda axis, _: lambda args: {"x": verb(args["x"], axis)})
  with pytest.raises(ValueError, match="only sums and gathers"):
    apart(LoopbackCollectives(), {"x": np.zeros((1, 4), "f4")})


def test_16_bit_sum_is_refused():
  def make(axis, _):
    return lambda args: {
      "plain": all_reduce(args["x"].astype("bfloat16"), axis)
    }

  with pytest.raises(ValueError, match="sum of bfloat16"):
    _apart(make)(LoopbackCollectives(), {"x": np.zeros((1, 4), "f4")})


@pytest.mark.parametrize(("weights", "expected"), [
  ((2.0,), 0), ((2.0, 2.0), 0), ((2.0, 1.0), 2), ((1.0, 2.0, 2.0), 3),
])
def test_equal_weights_are_a_plain_mean(weights, expected):
  """The function receives no weights then."""
  exchange = LoopbackCollectives()
  exchange.contributors, exchange.weights = range(len(weights)), weights
  apart = _apart(lambda axis, weights: lambda args: {
    "x": args["x"] * axis.size + 10 * len(weights)
  })
  found = apart(exchange, {"x": np.ones((1, 4), "f4")})
  np.testing.assert_array_equal(
    found["x"], np.full((1, 4), len(weights) + 10 * expected)
  )


def test_single_worker_runs_the_function_inside_another_one():
  apart = _apart(lambda axis, _: lambda args: {
    "x": 2 * all_reduce(args["x"], axis)[None] / axis.size
  })
  x = np.arange(4, dtype="f4")[None]
  inside = jax.jit(jax.shard_map(
    apart.alone, mesh=make_mesh({"worker": ONE, "tensor": TENSOR}),
    in_specs=(_specs(["x"]),), out_specs={"x": P(None, "tensor")},
  ))
  np.testing.assert_array_equal(inside({"x": x})["x"], 2 * x)
  exchange = LoopbackCollectives()
  assert exchange.sum(x) is x
  assert (exchange.rank, exchange.weights) == (0, (1.0,))


def test_counted_collectives_have_the_shapes_of_two_workers():
  axis, count = counting_axis("worker")
  assert count() == 0

  def step(x):
    total = all_reduce(x, axis) / axis.size
    ranks = all_gather(ranks_here(axis)[:, None], axis)
    return total, all_gather(x, axis), ranks

  total, gathered, ranks = jax.eval_shape(step, jnp.ones((1, 3, 8)))
  assert count() == 3
  assert total.shape == (3, 8)
  assert gathered.shape == (2 * 3, 8)
  assert ranks.shape == (2,)
  assert ranks.dtype == jnp.int32
  with pytest.raises(ValueError, match="sum of int32 is not supported"):
    jax.eval_shape(lambda x: all_reduce(x, axis), jnp.ones((1, 2), jnp.int32))


_PROCESS = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from parallel.outer.apart import to_host_array

port, number = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
full = np.arange(24, dtype=np.float32).reshape(4, 6)
for spec in (P("data", "tensor"), P("tensor", "data"), P(None, "data"),
             P("tensor"), P()):
  x = jax.make_array_from_callback(
    full.shape, NamedSharding(mesh, spec), lambda part: full[part]
  )
  found = to_host_array(x)
  assert type(found) is np.ndarray
  np.testing.assert_array_equal(found, full)
print("equal")
"""


def test_array_of_several_processes_is_gathered_whole():
  """Each of two processes has only a part of most arrays."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = str(server.getsockname()[1])
  running = [
    subprocess.Popen(
      [sys.executable, "-c", _PROCESS, port, number], text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) for number in "01"
  ]
  try:
    ends = [process.communicate(timeout=300) for process in running]
  finally:
    for process in running:
      process.kill()
  assert all(out.endswith("equal\n") for out, _ in ends), ends
