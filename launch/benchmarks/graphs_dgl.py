"""Samples with DGL, in a Python that has it and none of ours.

  PYTHON graphs_dgl.py FOLDER WARM_UP THREADS FANOUT...

The folder is one of `caatnet.data.graphs.csr`, with ``roots.npy``, int32
``[batches, B]``. DGL's sampler makes nodes unique from level to level, so its
time has that in it, and it samples a node's neighbours once per level.
"""

import json
import pathlib
import sys
import time


def main() -> None:
  """Prints one line of JSON."""
  import dgl
  import numpy as np
  import torch

  folder, warm, threads, *fanouts = sys.argv[1:]
  folder, warm, threads = pathlib.Path(folder), int(warm), int(threads)
  torch.set_num_threads(threads)
  # DGL's fan-outs begin with the level that is farthest from the roots.
  sampler = dgl.dataloading.NeighborSampler(
    [int(f) for f in reversed(fanouts)]
  )
  batches = np.load(folder / "roots.npy")
  found = []
  for dtype in (np.int64, np.int32):  # DGL takes both; the faster one counts
    indptr, indices = (
      torch.from_numpy(np.load(folder / f"{name}.npy").astype(dtype))
      for name in ("indptr", "indices")
    )
    graph = dgl.graph(("csc", (indptr, indices, [])))
    edges = unique = 0
    seconds = 0.0
    for number, roots in enumerate(batches):
      seeds = torch.from_numpy(np.unique(roots.astype(dtype)))
      start = time.perf_counter()
      inputs, _, blocks = sampler.sample(graph, seeds)
      if number >= warm:
        seconds += time.perf_counter() - start
        edges += sum(block.num_edges() for block in blocks)
        unique += len(inputs)
    found.append({
      "of": f"DGL {dgl.__version__}, {np.dtype(dtype)}", "edges": edges,
      "unique": unique, "sampled_s": None, "with_unique_s": seconds,
    })
  print(json.dumps(min(found, key=lambda row: row["with_unique_s"])))


if __name__ == "__main__":
  main()
