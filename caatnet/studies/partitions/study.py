"""Study of partitions of training state: memory, bytes, time, Pareto fronts.

`caatnet.studies.partitions.predictor` predicts the cost of every named scheme
and of all partitions of nested levels on a cluster. The study finds the fastest
partition under a memory cap, for several numbers of microbatches and for every
model size. For the setting of Xu et al. (arXiv 2501.04266) it compares the
published speedups with the predicted ones, which do not reproduce them.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

from caatnet.studies.partitions import predictor
from caatnet.studies.partitions.predictor import Machine, Prediction, Workload
from parallel.base import checks
from parallel.base.naming import prefix_error_keys
from parallel.plans.hardware import clusters
from parallel.plans.zero import partition
from parallel.plans.zero.partition import CODECS, Partition

SOURCE = "arXiv 2501.04266: 20B parameters, 384 GCDs"
# Published ratios of TFLOPS per GPU: one scheme to another, and one scheme on
# all nodes to the same scheme on few nodes.
_SPEEDUPS = (
  ("frontier3_quantised", "zeropp", 1.71),
  ("zeropp", "zero3", 1.405),
)
_SCALING = ("frontier3_quantised", 0.94)

# Two ways to count the bytes that enter a node. With reuse, one rank receives
# them and forwards them inside the node; without, every rank receives them.
REUSE = {"reuse": True, "no reuse": False}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: Config like configs/zero/frontier.py, as nested dicts.

  Returns:
    Plain data: "assumptions"; "schemes", the named partitions; "candidates",
    all partitions; "fronts", Pareto fronts without a memory cap; "best", the
    fastest partition by number of microbatches; "published", the ratios of Xu
    et al., None in other settings. Sizes are in bytes, times in s per step.

  Raises:
    ValueError: The cluster is unknown, the levels do not fit it, or a number is
      out of its range.
  """
  machine, workload = _machine(config), _workload(config)
  space = _space(config, machine)
  schemes = _schemes(machine, config["zero"]["block"])

  def priced(work: Workload) -> list[Prediction]:
    return [
      predictor.predict(part, machine, work, overlap=config["overlap"])
      for part in space
    ]

  def row(prediction: Prediction) -> dict[str, Any]:
    try:
      largest = predictor.largest_model(
        prediction.partition, workload, machine.memory_bytes
      )
    except ValueError as error:
      raise ValueError(
        f"config.memory_gb={config['memory_gb']} with config.num_layers="
        f"{config['num_layers']}: {error}"
      ) from error
    return _row(prediction, machine) | {"largest_model": largest}

  # All partitions with the config's own number of microbatches.
  candidates = priced(workload)
  return {
    "study": "partitions",
    "assumptions": _assumptions(config, machine, workload),
    "schemes": {
      name: row(
        predictor.predict(part, machine, workload, overlap=config["overlap"])
      )
      for name, part in schemes.items()
    },
    "candidates": [_row(p, machine) for p in candidates],
    "fronts": {
      key: [row(p) for p in predictor.pareto_front(chosen, math.inf, reuse)]
      for key, reuse, chosen in _candidate_sets(candidates)
    },
    "best": [
      {
        "accumulation": count,
        "answers": {
          key: found and _row(found, machine)
          for key, reuse, chosen in _candidate_sets(
            priced(dataclasses.replace(workload, accumulation=count))
          )
          for found in [predictor.best(chosen, machine.memory_bytes, reuse)]
        },
      }
      for count in config["accumulations"]
    ],
    "published": _predict_paper_ratios(config, machine, workload)
    if _is_published(machine, workload, config["cluster"]) else None,
  }


def _machine(config: Mapping[str, Any]) -> Machine:
  """Validates the machine part of the config and builds the machine."""
  name = config["cluster"]
  checks.known("config.cluster=", name, clusters.CLUSTERS)
  text, cluster = config["zero"]["levels"], clusters.CLUSTERS[name]
  with prefix_error_keys("config.zero", ("levels",)):
    levels = partition.parse_levels(text, config["parallel"]["data"])
  flops = cluster.device.peak("bfloat16") * config["utilisation"]
  try:
    machine = predictor.machine(
      cluster, levels, flops=flops, memory_bytes=1e9 * config["memory_gb"]
    )
  except ValueError as error:
    raise ValueError(f"config.zero.levels={text!r}: {error}") from error
  return dataclasses.replace(
    machine,
    bandwidths=machine.bandwidths
    | _overrides(config["bandwidths"], machine.bandwidths),
  )


def _overrides(text: str, known: Mapping[str, float]) -> dict[str, float]:
  """Parses bandwidths of levels: ``"gpu:100"`` is ``{"gpu": 100e9}``.

  `known` has the names of the machine's levels.
  """
  found = {}
  for part in filter(None, text.split(",")):
    name, _, value = (piece.strip() for piece in part.partition(":"))
    try:
      found[name] = 1e9 * float(value)
    except ValueError:
      found[name] = 0.0  # rejected below
    if name not in known or not 0 < found[name] < math.inf:
      raise ValueError(
        f"config.bandwidths={text!r}: {part!r} must be level:GB/s, where level "
        f"is one of {', '.join(known)}"
      )
  return found


def _workload(config: Mapping[str, Any]) -> Workload:
  """Validates the model and step part of the config and builds the workload."""
  names = [field.name for field in dataclasses.fields(Workload)]
  with prefix_error_keys("config", names):
    return Workload(**{name: config[name] for name in names})


def _space(config: Mapping[str, Any], machine: Machine) -> list[Partition]:
  """Lists all partitions with the config's codecs."""
  keys = ("weight_codecs", "gradient_codecs", "secondary_codecs")
  for key in keys:
    for codec in config[key]:
      checks.known(f"config.{key}: ", codec, CODECS)
    # Some fronts contain only partitions without codecs.
    if "none" not in config[key] and key != "secondary_codecs":
      raise ValueError(f"config.{key}={tuple(config[key])} must contain 'none'")
  return list(predictor.candidates(
    machine.levels, block=config["zero"]["block"],
    **{key: config[key] for key in keys},
  ))


def _schemes(machine: Machine, block: int) -> dict[str, Partition]:
  """Returns named schemes, for as many levels as a machine has.

  `block` is the number of elements that share a scale in codecs.
  """
  found = {}
  for name in partition.SCHEMES:
    try:
      found[name] = dataclasses.replace(
        partition.named(name, machine.levels), block=block
      )
    except ValueError:  # with one level: the scheme needs two
      if len(machine.levels) > 1:
        raise
  return found


def _candidate_sets(
  candidates: Sequence[Prediction],
) -> Iterator[tuple[str, bool, list[Prediction]]]:
  """Yields the sets of candidates from which fronts and best are selected.

  Yields:
    (name of the set; whether step times assume that ranks of a node reuse the
    data that enter it; all candidates, or only those without codecs).
  """
  plain = [
    p for p in candidates
    if p.partition.weight_codec == p.partition.gradient_codec
    == p.partition.secondary_codec == "none"
  ]
  for way, reuse in REUSE.items():
    yield f"{way}, coded or not", reuse, list(candidates)
    yield f"{way}, not coded", reuse, plain


def _row(p: Prediction, machine: Machine) -> dict[str, Any]:
  """Converts a prediction to plain data."""
  part = p.partition
  received = dict(zip(REUSE, (p.received, p.direct), strict=True))
  return {
    "partition": str(part),
    "degrees": [
      part.degree(depth)
      for depth in (part.weights, part.gradients, part.optimizer)
    ],
    "secondary": part.secondary and part.degree(part.secondary),
    "weight_codec": part.weight_codec,
    "gradient_codec": part.gradient_codec,
    "secondary_codec": part.secondary_codec,
    # Moments are a part of "stored".
    "memory": {
      key: size for key, size in dataclasses.asdict(p.memory).items()
      if key != "moments"
    } | {"total": p.memory.total},
    "fits": p.memory.total <= machine.memory_bytes,
    "received": {
      way: {
        level.name: sum(
          size for (name, _), size in sizes.items() if name == level.name
        )
        for level in machine.levels
      }
      for way, sizes in received.items()
    },
    "node": {
      way: predictor.node_bytes(sizes, machine)
      for way, sizes in received.items()
    },
    "seconds": dict(zip(REUSE, (p.seconds, p.direct_seconds), strict=True)),
  }


def _assumptions(
  config: Mapping[str, Any], machine: Machine, workload: Workload
) -> dict[str, Any]:
  """Returns the assumptions of the predictions, with sources."""
  cluster = clusters.CLUSTERS[config["cluster"]]
  device = cluster.device
  # A cluster's levels begin with the innermost one; a run may use only some.
  used = zip(machine.levels[::-1], cluster.levels, strict=False)
  return {
    "cluster": cluster.name,
    "devices": config["parallel"]["data"],
    "levels": [
      {
        "name": level.name,
        "size": level.size,
        "bandwidth": machine.bandwidths[level.name],
        "overridden": machine.bandwidths[level.name]
        != place.link.bandwidth * place.links_per_device,
        "link": place.link.name,
        "source": place.link.source,
        "confidence": place.link.confidence,
      }
      for level, place in used
    ],
    "peak_flops": device.peak("bfloat16"),
    "peak_source": device.source,
    "peak_confidence": device.confidence,
    "utilisation": config["utilisation"],
    "memory_bytes": machine.memory_bytes,
    "compute_seconds": predictor.compute_seconds(machine, workload),
    "overlap": config["overlap"],
    **dataclasses.asdict(workload),
  }


def _is_published(machine: Machine, workload: Workload, cluster: str) -> bool:
  """Returns whether machine, model size and cluster are those of Xu et al."""
  sizes = [level.size for level in machine.levels]
  setting = (cluster, sizes, workload.parameters)
  return setting == ("frontier", [48, 4, 2], 20e9)  # 48 nodes x 4 x 2 GCDs


def _predict_paper_ratios(
  config: Mapping[str, Any], machine: Machine, workload: Workload
) -> dict[str, Any]:
  """Predicts the throughput ratios of Xu et al. by number of microbatches."""
  rows = []
  for count in config["accumulations"]:
    work = dataclasses.replace(workload, accumulation=count)
    for faster, slower, paper in _SPEEDUPS:
      # A ratio of throughputs is the inverse ratio of step times.
      pair = [
        _predict_step_times(s, machine, work, config) for s in (slower, faster)
      ]
      rows.append((f"{faster} / {slower}", count, paper, pair))
    scheme, paper = _SCALING
    few = _smallest_machine(scheme, machine, work, config)
    pair = [
      _predict_step_times(scheme, m, work, config) for m in (few, machine)
    ]
    nodes = f"{machine.levels[0].size} / {few.levels[0].size} nodes"
    rows.append((f"{scheme}, {nodes}", count, paper, pair))
  return {
    "source": SOURCE,
    "rows": [
      {
        "ratio": label,
        "accumulation": count,
        "paper": paper,
        "ours": {key: slow[key] / fast[key] for key in fast},
      }
      for label, count, paper, (slow, fast) in rows
    ],
  }


def _predict_step_times(
  scheme: str, machine: Machine, workload: Workload, config: Mapping[str, Any]
) -> dict[str, float]:
  """Predicts a scheme's seconds per step by reuse and overlap."""
  part = _schemes(machine, config["zero"]["block"])[scheme]
  found = {}
  for overlap in (False, True):
    p = predictor.predict(part, machine, workload, overlap=overlap)
    for way, seconds in zip(REUSE, (p.seconds, p.direct_seconds), strict=True):
      found[f"{way}, {'overlap' if overlap else 'no overlap'}"] = seconds
  return found


def _smallest_machine(
  scheme: str, machine: Machine, workload: Workload, config: Mapping[str, Any]
) -> Machine:
  """Returns the part of a machine with the fewest nodes that fit a scheme."""
  outermost, *inside = machine.levels
  for size in range(1, outermost.size):
    levels = (dataclasses.replace(outermost, size=size), *inside)
    fewer = dataclasses.replace(machine, levels=levels)
    # The size of a shard, and so memory, depends on the number of nodes.
    part = _schemes(fewer, config["zero"]["block"])[scheme]
    if predictor.predict(part, fewer, workload).memory.total <= (
      machine.memory_bytes
    ):
      return fewer
  return machine
