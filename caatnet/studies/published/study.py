"""Study of published configurators, with all choices timed by one simulator."""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from caatnet.studies.published import choosers
from caatnet.studies.published.choosers import PublishedSetting
from parallel.base.checks import known
from parallel.plans.hardware import cluster_files
from parallel.plans.planner.latency import TimingAssumptions
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices
from parallel.plans.workload import (
  UTILISATION_SOURCE,
  TrainingStep,
  Transformer,
)

# Models of Pipette's evaluation, in float16, since the V100 has no bfloat16.
MODELS = {
  name: Transformer(
    vocab_size=50_256, width=width, num_layers=num_layers, num_heads=32,
    num_kv_heads=32, ffn_width=ffn_width, dtype="float16",
  )
  for name, width, num_layers, ffn_width in (
    ("3.1B", 2720, 32, 7296), ("11.1B", 4288, 48, 11_648)
  )
}
_SEQ_LEN = 1024
# Pipette's speed-ups (arXiv 2405.18093) over the choices of other
# configurators. Quoted from memory, not verified.
RECALLED_SPEEDUPS = {"amp": "up to 1.46", "trials": "about 1.1"}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Runs all configurators and times their choices.

  Args:
    config: Config like configs/planner/published.py, as nested dicts.

  Returns:
    Plain data: "rows", one for each cluster, links, model and configurator;
    "speed_ups" of Pipette over the others; and "assumptions".

  Raises:
    ValueError: A value is invalid, or no configuration fits.
  """
  for key, names in (("choosers", choosers.CHOOSERS), ("models", MODELS)):
    for name in config[key]:
      known(f"config.{key}=", name, names)
  if not (config["even"] or config["seeds"]):
    raise ValueError(
      "config.even=False needs config.seeds, since otherwise there are no "
      "links to plan for"
    )
  links = [("even", "")] if config["even"] else []
  links += [(f"seed {s}", f",uneven={s}") for s in config["seeds"]]
  for cluster, (_, drawn) in itertools.product(config["clusters"], links):
    try:
      cluster_files.cluster(cluster + drawn)
    except ValueError as error:
      raise ValueError(f"config.clusters={cluster!r}: {error}") from error
  cases = list(itertools.product(config["clusters"], config["models"], links))
  rows = []
  for cluster, name, (text, drawn) in track(
    cases, "choosing", transient=True, console=Console(stderr=True)
  ):
    rows += [
      {"cluster": cluster, "links": text, "model": name, **row}
      for row in _evaluate_choosers(
        config, MODELS[name], cluster, cluster + drawn
      )
    ]
  return {
    "study": "published", "rows": rows, "speed_ups": _speed_ups(rows),
    "assumptions": {
      "judge": "parallel/plans/planner/latency.py for all, stages "
      f"{config['execution']}; memory: parallel/plans/planner/memory.py for "
      "all",
      "utilisation": f"{config['utilisation']:g} of the peak: "
      f"{UTILISATION_SOURCE}",
      "links": "an adapter of a node is shared by its eight devices, all of "
      "which send at once; drawn links reach 25% to 100% of that, a "
      "distribution of ours",
      "models": "layers, widths and a batch of "
      f"{config['batch_size']} are ours; SwiGLU; what is not computed "
      "again is kept",
    },
    "config": dict(config),
  }


def _evaluate_choosers(
  config: Mapping[str, Any], sizes: Transformer, cluster: str, drawn: str
) -> list[dict[str, Any]]:
  """Returns the choice of each configurator on one cluster for one model.

  Args:
    config: Config of the study.
    sizes: Sizes of the model.
    cluster: Cluster whose links have their published bandwidths.
    drawn: The same cluster with its actual bandwidths, equal or drawn.
  """
  step = TrainingStep(sizes, config["batch_size"], _SEQ_LEN)
  timing = TimingAssumptions(config["utilisation"], config["execution"])
  nominal, problem = (
    Problem(step, cluster_files.cluster(text), timing)
    for text in (cluster, drawn)
  )
  case = PublishedSetting(
    problem, nominal, Choices(), config["annealed"], config["steps"]
  )
  rows = []
  for name in config["choosers"]:
    choice = choosers.choose(name, case)
    latency = problem.predict(choice.configuration, choice.order)
    rows.append({
      "chooser": name, "configuration": str(choice.configuration),
      "seconds": latency.total, "said_s": choice.said_s,
      "in_vain": choice.in_vain, "latency": dataclasses.asdict(latency),
    })
  return rows


def _speed_ups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the speed-up of Pipette's choice over each other configurator's.

  Each row also has the median ratio of the configurator's own prediction to
  the simulated time.
  """
  def case(row):
    return row["cluster"], row["links"], row["model"]

  pipette = {
    case(row): row["seconds"] for row in rows if row["chooser"] == "pipette"
  }
  found = []
  for name in dict.fromkeys(row["chooser"] for row in rows):
    own = [row for row in rows if row["chooser"] == name]
    times = [
      row["seconds"] / pipette[case(row)] for row in own if case(row) in pipette
    ]
    said = [row["said_s"] / row["seconds"] for row in own if row["said_s"]]
    if times:
      found.append({
        "over": name, "cases": len(times), "least": min(times),
        "median": float(np.median(times)), "most": max(times),
        "recalled": RECALLED_SPEEDUPS.get(name, ""),
        "said": float(np.median(said)) if said else None,
      })
  return found
