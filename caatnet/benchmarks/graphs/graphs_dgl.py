"""Sampling with DGL, in a separate Python without this repository.

  PYTHON graphs_dgl.py FOLDER WARM_UP THREADS FANOUT...

The folder is one of `caatnet.data.graphs.csr`, with ``roots.npy``, int32
``[batches, B]``. DGL's sampler removes duplicate nodes at each level, which its
time includes, and it samples a node's neighbours once per level.
"""

import json
import pathlib
import sys
import time


def parse_arguments(arguments: list[str]) -> tuple[
  pathlib.Path, int, int, list[int]
]:
  """Returns folder, number of warm-up batches, threads and fan-outs."""
  folder, *numbers = arguments
  warm, threads, *fanouts = map(int, numbers)
  return pathlib.Path(folder), warm, threads, fanouts


def main() -> None:
  """Samples all batches; prints counts and seconds as a line of JSON."""
  import dgl
  import numpy as np
  import torch

  folder, warm, threads, fanouts = parse_arguments(sys.argv[1:])
  torch.set_num_threads(threads)
  # DGL's fan-outs begin with the level that is farthest from the roots.
  sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
  batches = np.load(folder / "roots.npy")
  # With int32, which DGL 2.1.0 accepts, it samples only a third of the edges.
  indptr, indices = (
    torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int64))
    for name in ("indptr", "indices")
  )
  graph = dgl.graph(("csc", (indptr, indices, [])))
  edges = unique = 0
  seconds = 0.0
  for number, roots in enumerate(batches):
    seeds = torch.from_numpy(np.unique(roots.astype(np.int64)))
    start = time.perf_counter()
    inputs, _, blocks = sampler.sample(graph, seeds)
    if number >= warm:
      seconds += time.perf_counter() - start
      edges += sum(block.num_edges() for block in blocks)
      unique += len(inputs)
  print(json.dumps({
    "of": f"DGL {dgl.__version__}", "edges": edges, "unique": unique,
    "sampled_s": None, "with_unique_s": seconds,
  }))


if __name__ == "__main__":
  main()
