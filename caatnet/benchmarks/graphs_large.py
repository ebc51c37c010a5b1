"""Builds and trains a large graph in a process with little memory.

`caatnet.benchmarks.graphs` starts it. The limit (RLIMIT_DATA) is on memory of
the process's own: the heap, stacks and private mappings. Pages of the graph's
files are the system's, which takes them back when it needs them. What was
resident at most is printed with them.
"""

import json
import pathlib
import resource
import sys
import time
from typing import Any


def main() -> None:
  """Prints one line of JSON."""
  config = json.loads(sys.argv[1])
  options = config["benchmark"]
  large = options["large"]
  limit = large["limit_mb"] * 10**6
  resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
  from caatnet.data.graphs import builders
  from caatnet.data.graphs.csr import open_graph

  folder, rows = pathlib.Path(options["folder"]), []
  start = time.perf_counter()
  if not (folder / "meta.json").exists():
    builders.rmat(
      folder, scale=large["scale"], num_edges=large["num_edges"],
      num_features=large["num_features"], num_classes=8, signal=1.0, seed=0,
      quarters=(0.57, 0.19, 0.19),
    )
    rows.append(_row("build", start, "-"))
  graph = open_graph(folder)
  start = time.perf_counter()
  options["num_features"] = graph.features.shape[1]
  loss = _train(config)
  rows.append(_row(f"train, {large['steps']} steps", start, loss))
  print(json.dumps({
    "nodes": graph.num_nodes, "edges": graph.num_edges,
    "features": graph.features.shape[1],
    "bytes": sum(f.stat().st_size for f in folder.iterdir()), "rows": rows,
  }))


def _train(config: dict[str, Any]) -> str:
  """Trains some steps; returns the losses of the first and the last."""
  import ml_collections

  from caatnet.benchmarks import graphs

  config = ml_collections.ConfigDict(config)
  options = config.benchmark
  found = graphs.timed(
    graphs.training(config, options.folder), options.large.steps
  )
  first, last = found["losses"]
  return (
    f"{first:.3f} to {last:.3f}, {1e3 * found['step_s']:.0f} ms per step, "
    f"{found['waited_s'] / found['step_s']:.0%} of it waits"
  )


def _row(part: str, start: float, loss: str) -> dict[str, Any]:
  """Returns the time since ``start`` and the most memory so far."""
  status = {
    line.split(":")[0]: int(line.split()[1])
    for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    if line.endswith("kB")
  }
  return {
    "part": part, "seconds": time.perf_counter() - start, "loss": loss,
    "own_mb": status["RssAnon"] * 1024 / 1e6,
    "resident_mb": status["VmHWM"] * 1024 / 1e6,
  }


if __name__ == "__main__":
  main()
