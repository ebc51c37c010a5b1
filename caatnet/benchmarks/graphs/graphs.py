"""Benchmark of graph networks: sampler, caches, waiting, a large graph."""

import copy
import pathlib
import resource
import tempfile
import time
from typing import Any

import jax
import numpy as np

from caatnet.benchmarks.graphs import graphs_predictor
from caatnet.benchmarks.harness import scripts, setup
from caatnet.config import experiments
from caatnet.data.graphs import builders
from caatnet.data.graphs.csr import Graph, open_graph
from caatnet.data.graphs.data import Trees
from caatnet.data.graphs.sampling import Sampler, num_tree_positions
from caatnet.show import tables
from caatnet.studies.alignment import predictor
from caatnet.train.prefetch import PrefetchIterator
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.links import PCIE_4, PCIE_5
from parallel.plans.placement import caches

# Options of all R-MAT graphs.
_RMAT = {
  "num_classes": 8, "signal": 1.0, "seed": 0, "quarters": (0.57, 0.19, 0.19),
}


def run(config: Any) -> dict[str, Any]:
  """Runs the measurements ``config.benchmark.parts``, and prints tables.

  Returns plain data.

  Args:
    config: Config like configs/benchmark/graphs.py.
  """
  options = config.benchmark
  result: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as folder:
    if {"sampler", "caches", "waits"} & set(options.parts):
      graph = builders.rmat(
        folder, scale=options.scale, num_edges=options.num_edges,
        num_features=options.num_features, **_RMAT,
      )
    if "sampler" in options.parts:
      result["sampler"] = _time_samplers(options, graph)
    if "caches" in options.parts:
      result["caches"] = _compute_hit_rates(options, graph)
    if "waits" in options.parts:
      result["waits"] = _measure_waits(config, graph)
  if "large" in options.parts:
    result["large"] = _run_large_graph(config)
  if "predicted" in options.parts:
    result["predicted"] = _predict_steps(options)
  return result


def _time_samplers(options: Any, graph: Graph) -> dict[str, Any]:
  """Times batches of our sampler and of DGL's, on the same roots."""
  rng = np.random.default_rng(0)
  warm = max(1, options.samples // 10)
  roots = rng.integers(
    graph.num_nodes, size=(warm + options.samples, options.batch_size)
  ).astype(np.int32)
  sampler = Sampler(graph, options.fanouts, 0, options.threads)
  seconds, edges, unique = [], 0, 0
  for number, nodes in enumerate(roots):
    start = time.perf_counter()
    ids, degrees = sampler.sample(nodes, number * len(nodes))
    sampled = time.perf_counter()
    distinct = len(np.unique(ids))
    if number >= warm:
      seconds.append((sampled - start, time.perf_counter() - sampled))
      edges += num_edges(degrees, options.fanouts)
      unique += distinct
  total = np.array(seconds).sum(axis=0)
  rows = [{
    "of": f"ours, {sampler.implementation}",
    "edges": edges, "unique": unique,
    "sampled_s": float(total[0]), "with_unique_s": float(total.sum()),
  }]
  if options.python_path:
    rows.append(_time_dgl_sampler(options, graph, roots, warm))
  count = options.samples
  tables.print_table(
    f"R-MAT, {graph.num_nodes:,} nodes, {graph.num_edges:,} edges; "
    f"{count} batches of {options.batch_size}, fan-outs "
    f"{tuple(options.fanouts)}, {options.threads} threads; one run",
    ["sampler", "edges per batch", "edges/s", "ms per batch",
     "ms with unique nodes", "unique nodes per batch"],
    [
      [
        row["of"], f"{row['edges'] / count:,.0f}",
        "-" if row["sampled_s"] is None
        else f"{row['edges'] / row['sampled_s']:,.0f}",
        "-" if row["sampled_s"] is None
        else f"{1e3 * row['sampled_s'] / count:.2f}",
        f"{1e3 * row['with_unique_s'] / count:.2f}",
        f"{row['unique'] / count:,.0f}",
      ]
      for row in rows
    ],
  )
  return {"rows": rows}


def num_edges(degrees: np.ndarray, fanouts: tuple[int, ...]) -> int:
  """Returns the number of edges in sampled trees, without padding.

  Args:
    degrees: Degree of the node at each position of B trees, int ``[B, T]``.
    fanouts: Sampled neighbours per node, level by level.
  """
  parents = num_tree_positions(fanouts[:-1])
  # A node has as many edges as its fan-out, or its degree if that is smaller.
  width = np.concatenate([
    np.full(int(np.prod(fanouts[:level])), fanout)
    for level, fanout in enumerate(fanouts)
  ])
  return int(np.minimum(degrees[:, :parents], width).sum())


def _time_dgl_sampler(
  options: Any, graph: Graph, roots: np.ndarray, warm: int
) -> dict[str, Any]:
  """Samples batches of trees of ``roots`` with DGL, in a Python that has it.

  The first ``warm`` batches are not timed.
  """
  script = pathlib.Path(__file__).with_name("graphs_dgl.py")
  np.save(graph.folder / "roots.npy", roots)
  return scripts.ask_script(
    [options.python_path, str(script), str(graph.folder), str(warm),
     str(options.threads), *map(str, options.fanouts)],
    environment={"OMP_NUM_THREADS": str(options.threads)},
  )


def _compute_hit_rates(options: Any, graph: Graph) -> dict[str, Any]:
  """Computes hit rates of caches and bytes of features of sampled batches."""
  trees = Trees(
    Sampler(graph, options.fanouts, 0, options.threads), graph.nodes("train"),
    options.batch_size, seed=0,
  )

  def batches(first, number):
    return [
      np.unique(trees.at((first + i) * options.batch_size)[1])
      for i in range(number)
    ]

  # Presampling counts other batches than those on which hits are counted.
  stream, before = batches(0, options.samples), batches(2**20, options.samples)
  asked = sum(map(len, stream))
  degree = np.bincount(graph.indices, minlength=graph.num_nodes)
  seen = caches.count(before, graph.num_nodes)
  rows = []
  for share in options.shares:
    size = int(share * graph.num_nodes)
    by = {
      "degree": caches.hits_of_set(stream, caches.most_frequent(degree, size)),
      "presampling": caches.hits_of_set(
        stream, caches.most_frequent(seen, size)
      ),
      "lru": caches.count_lru_hits(stream, size),
      "belady": caches.count_belady_hits(stream, size),
      # optimal, needs the future
    }
    rows.append({"share": share} | {k: v / asked for k, v in by.items()})
  width = 4 * options.num_features  # bytes of a row
  places = options.samples * options.batch_size * num_tree_positions(
    options.fanouts
  )
  sizes = {
    "places": places * width,
    "unique": asked * width,
    "least": len(np.unique(np.concatenate(stream))) * width,
  }
  tables.print_table(
    f"{options.samples} batches, {asked:,} rows after deduplication. Bytes of "
    f"features: all places {sizes['places'] / 1e9:.3f} GB, each row once per "
    f"batch {sizes['unique'] / 1e9:.3f} GB, each row once (the least possible) "
    f"{sizes['least'] / 1e9:.3f} GB",
    "share:.0%=room | degree:.1%=by degree | presampling:.1%=by presampling | "
    "lru:.1%=LRU | belady:.1%=Belady | of.*/1e9:.3f",
    [
      row | {"of": {
        f"GB, {k}": sizes["unique"] * (1 - row[k])
        for k in ("presampling", "belady")
      }} for row in rows
    ],
  )
  return {"rows": rows, "bytes": sizes}


def build_experiment(config: Any, folder: Any, **changes: Any) -> Any:
  """Builds the benchmark's training run on a graph in a folder.

  Args:
    config: Config like configs/benchmark/graphs.py.
    folder: Folder of the graph.
    **changes: Further keys of ``config.data``.
  """
  options, config = config.benchmark, setup.without_benchmark(config)
  with config.unlocked(), config.ignore_type():
    config.data.update({
      "path": str(folder), "num_features": options.num_features,
      "fanouts": tuple(options.fanouts), "batch_size": options.batch_size,
      "threads": options.threads,
    } | changes)
  return experiments.build(config)


def _measure_waits(config: Any, graph: Graph) -> dict[str, Any]:
  """Trains, and measures the fraction of time spent waiting for batches."""
  options = config.benchmark
  rows = [
    time_steps(
      build_experiment(config, graph.folder, **changes), options.steps
    ) | {
      "changes": " ".join(f"data.{k}={v}" for k, v in changes.items())
    }
    for changes in (
      {"ahead": 0, "sampler": "reference"}, {"ahead": 0}, {"ahead": 1},
      {"ahead": 1, "cache_rows": graph.num_nodes // 20},
    )
  ]
  tables.print_table(
    f"{options.steps} steps of {options.batch_size} nodes, hidden width "
    f"{config.model.width}: time that the step waits for sampled and gathered "
    "rows",
    "changes=keys | step_s | waited_s=waits | share | worked_s=host's work | "
    "fetched_bytes",
    [row | {"share": row["waited_s"] / row["step_s"]} for row in rows],
  )
  return {"rows": rows}


def time_steps(experiment: Any, steps: int) -> dict[str, Any]:
  """Trains some steps, after two untimed ones.

  Args:
    experiment: The run; it writes no files.
    steps: Number of timed steps.

  Returns:
    Means per timed step: its seconds, seconds of waiting for a batch and of
    the host's work, bytes fetched; and "losses" of the first and last step.
  """
  dataset = experiment.data.load(experiment.seed)
  batches = PrefetchIterator(
    experiment.program.layout, dataset.batches, dataset.ahead
  )
  program = experiment.lower_step().compile(
    experiment.program.layout.compiler_options()
  )
  state, losses = experiment.init_state(), []
  for number in range(steps + 2):
    # The first two steps, which fill the prefetch queue, are not timed.
    if number == 2:
      start = time.perf_counter()
      waited, worked = batches.waited_s, batches.worked_s
    state, metrics = program(state, next(batches), ())
    # As in the training loop, the host is at most one step ahead of devices.
    losses.append(metrics["loss"])
    jax.block_until_ready(losses[-2:-1])
  jax.block_until_ready(state)
  seconds = time.perf_counter() - start
  batches.close()
  width, counts = dataset.table.rows.shape[1], dataset.table.counts
  step_places = experiment.data.batch_size * num_tree_positions(
    experiment.data.fanouts
  )
  return {
    "step_s": seconds / steps,
    "waited_s": (batches.waited_s - waited) / steps,
    "worked_s": (batches.worked_s - worked) / steps,
    # Prefetched batches are counted, though they are not trained on.
    "fetched_bytes": 4 * width * counts.fetched * step_places / counts.places,
    "losses": [float(losses[0][0]), float(losses[-1][0])],
  }


def _run_large_graph(config: Any) -> dict[str, Any]:
  """Builds a graph and trains on it in a process with a memory limit."""
  options = config.benchmark
  config = copy.deepcopy(config)
  with tempfile.TemporaryDirectory() as folder:
    config.benchmark.folder = options.folder or folder
    try:
      found = scripts.call_in_process(_build_and_train, config)
    except (RuntimeError, MemoryError) as error:
      raise ValueError(
        f"config.benchmark.large: the process has ended: {error!r}"
      ) from error
  tables.print_table(
    f"{found['nodes']:,} nodes x {found['features']} float32, "
    f"{found['edges']:,} edges, {found['bytes'] / 1e9:.2f} GB on disk; a "
    f"process with {options.large.limit_mb} MB without pages of files",
    "part | seconds:.1f | own_mb:,.0f=its own at the end, MB | "
    "resident_mb:,.0f=most resident, MB | loss", found["rows"],
  )
  return found


def _build_and_train(config: Any) -> dict[str, Any]:
  """Builds a large graph and trains on it in a process with little memory.

  The limit (RLIMIT_DATA) applies to private memory: the heap, stacks and
  private mappings. Pages of the graph's files belong to the page cache, which
  the kernel reclaims on demand; the peak of resident memory includes them.
  """
  options, large = config.benchmark, config.benchmark.large
  limit = large.limit_mb * 10**6
  resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
  folder, rows = pathlib.Path(options.folder), []
  start = time.perf_counter()
  if not (folder / "meta.json").exists():
    builders.rmat(
      folder, scale=large.scale, num_edges=large.num_edges,
      num_features=large.num_features, **_RMAT,
    )
    rows.append(_time_and_memory_row("build", start, "-"))
  graph = open_graph(folder)
  start = time.perf_counter()
  options.num_features = graph.features.shape[1]
  found = time_steps(build_experiment(config, folder), large.steps)
  first, last = found["losses"]
  rows.append(_time_and_memory_row(
    f"train, {large.steps} steps", start,
    f"{first:.3f} to {last:.3f}, {1e3 * found['step_s']:.0f} ms per step, "
    f"{found['waited_s'] / found['step_s']:.0%} of it waits",
  ))
  return {
    "nodes": graph.num_nodes, "edges": graph.num_edges,
    "features": graph.features.shape[1],
    "bytes": sum(f.stat().st_size for f in folder.iterdir()), "rows": rows,
  }


def _time_and_memory_row(part: str, start: float, loss: str) -> dict[str, Any]:
  """Returns a table row: seconds since ``start``, private and peak memory, MB.

  ``part`` and ``loss`` are further cells of the row.
  """
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


def _predict_steps(options: Any) -> dict[str, Any]:
  """Predicts step times on H200s, to compare with those of arXiv 2103.03330."""
  given, rows = options.predicted, []
  device = DEVICES["h200"]
  places = num_tree_positions(options.fanouts)
  parents = num_tree_positions(options.fanouts[:-1])
  for width in (100, 128, 602):
    # Two matrices per layer; 2 FLOPs forward and 4 backward per weight.
    flops = 12 * options.batch_size * (
      parents * width * given.hidden + given.hidden * 64
    )
    feature_bytes = 4 * width * options.batch_size * places * given.distinct
    compute_s = flops / (given.utilisation * device.peak("float32"))
    lines = 32 * predictor.mean_blocks(4 * width, 32, shifted=True) / (
      4 * width
    )
    for link in (PCIE_4, PCIE_5):
      for devices in (1, 4):
        step = graphs_predictor.predict(
          graphs_predictor.Host(
            given.gather, given.memory_bandwidth,
            given.link_share * link.bandwidth,
            devices,
          ),
          feature_bytes, compute_s, lines,
        )
        rows.append({
          "features": width, "link": link.name, "devices": devices,
          "conventional_s": step.conventional_s,
          "zero_copy_s": step.zero_copy_s,
          "overlapped_s": step.overlapped_s,
          "faster": step.faster - 1,
          "faster_overlapped": step.faster_overlapped - 1,
        })
  tables.print_table(
    "predicted, nothing measured: H200, GraphSAGE, fan-outs "
    f"{tuple(options.fanouts)}, batch {options.batch_size}, hidden "
    f"{given.hidden}; {given.distinct:.0%} of all places are distinct rows\n"
    f"assumed: cores gather {given.gather / 1e9:g} GB/s, host memory "
    f"{given.memory_bandwidth / 1e9:g} GB/s, {given.link_share:.0%} of a link, "
    f"{given.utilisation:.0%} of the peak; published: 65 to 92% faster on "
    "several GPUs (arXiv 2103.03330)",
    "features | link | devices=GPUs | conventional_s | zero_copy_s | "
    "overlapped_s | faster:.0% | faster_overlapped:.0%", rows,
  )
  return {"rows": rows}
