"""One of the processes whose all-reduce by jax and gloo is timed.

  python -m caatnet.benchmarks.ring_gloo INDEX COUNT PORT SIZE ROUNDS
"""

import json
import sys
import time

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np


def main() -> None:
  """Sums as often as it is told to; the first process prints the seconds."""
  index, count, port, size, rounds = map(int, sys.argv[1:])
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
  mesh = Mesh(np.array(jax.devices()), ("a",))

  def total(x):
    return jax.lax.psum(x, "a")

  x = jax.make_array_from_process_local_data(
    NamedSharding(mesh, P("a")), np.ones((1, size), np.float32)
  )
  add = jax.jit(jax.shard_map(
    lambda x: total(x)[0], mesh=mesh, in_specs=P("a"), out_specs=P()
  ))
  seconds = []
  for _ in range(rounds + 1):
    start = time.monotonic()
    jax.block_until_ready(add(x))
    seconds.append(time.monotonic() - start)
  if not index:
    print(json.dumps(seconds[1:]))  # the first one compiled
  jax.distributed.shutdown()


if __name__ == "__main__":
  main()
