"""Published configurators: their choices run, and are no better than search."""

import dataclasses

import numpy as np
import pytest

from caatnet.studies import registry
from caatnet.studies.published import models, study
from caatnet.studies.published.choosers import (
  CHOOSERS,
  PublishedSetting,
  choose,
)
from configs.planner import published as config_of
from parallel.plans.hardware import cluster_files
from parallel.plans.planner.latency import TimingAssumptions
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, violated_constraint
from parallel.plans.workload import TrainingStep, Transformer

MODEL = Transformer(8192, 2048, 8, 16, 16, 5632)


def _case(seed=1, gigabytes=80, batch=32, nodes=2):
  name = f"pipette-a100:{nodes}"
  nominal = cluster_files.cluster(name)
  device = dataclasses.replace(
    nominal.device, memory_bytes=int(gigabytes * 1e9)
  )
  nominal = dataclasses.replace(nominal, device=device)
  drawn = dataclasses.replace(
    cluster_files.cluster(f"{name},uneven={seed}"), device=device
  )
  step, timing = TrainingStep(MODEL, batch, 512), TimingAssumptions(
    execution="events"
  )
  problems = [Problem(step, links, timing) for links in (drawn, nominal)]
  choices = Choices(("1f1b", "gpipe"), (1,), routes=("psum",))
  return PublishedSetting(*problems, choices, annealed=2, steps=50)


def _seconds(choice, case):
  return case.problem.predict(choice.configuration, choice.order).total


def test_choosers_with_more_information_are_no_slower():
  # The planner anneals orders of up to 16 devices, which takes longest.
  case = _case(nodes=3)
  found = {name: choose(name, case) for name in CHOOSERS}
  for name, choice in found.items():
    c = choice.configuration
    assert violated_constraint(c, case.problem.step, case.choices) is None
    assert case.fits(c)
    assert sorted(choice.order.ravel()) == list(range(24))
    assert c.tensor <= 8 or name == "whole"
  seconds = {name: _seconds(x, case) for name, x in found.items()}
  in_order = ["whole", "same", "trials", "megatron", "rule"]
  assert [seconds[x] for x in in_order] == sorted(seconds[x] for x in in_order)
  assert seconds["trials"] <= seconds["amp"]
  assert seconds["rule"] > seconds["whole"]
  for name in ("same", "whole"):  # they minimise the reported time
    assert found[name].said_s == seconds[name]


def test_megatron_rule_fills_a_node_and_then_uses_few_stages():
  c = choose("rule", _case()).configuration
  assert (c.stages, c.data, c.tensor) == (1, 2, 8)
  tight = choose("rule", _case(gigabytes=4.2)).configuration
  assert (tight.stages, tight.data, tight.tensor) == (2, 1, 8)


def test_amp_ignores_links_and_memory():
  choices = [choose("amp", _case(seed)) for seed in (1, 2)]
  assert choices[0].configuration == choices[1].configuration
  assert choices[0].in_vain == 0
  case = _case(gigabytes=3.8, batch=8)
  tight = choose("amp", case)
  assert tight.in_vain > 0
  faster = [
    c for c in case.runs()
    if models.amp_s(
      c, case.nominal, np.arange(16).reshape(c.grid)
    ) < tight.said_s
  ]
  assert len(faster) == tight.in_vain
  assert not any(case.fits(c) for c in faster)


@pytest.mark.parametrize("name", ["rule", "megatron", "amp", "pipette"])
def test_error_if_nothing_fits(name):
  with pytest.raises(ValueError, match="fits"):
    choose(name, _case(gigabytes=3.5))


@pytest.mark.parametrize(("key", "value", "message"), [
  ("choosers", ("ampere",), "config.choosers='ampere' must be one of"),
  ("models", ("8B",), "config.models='8B' must be one of"),
  ("clusters", ("pipette-a100:2", "x"), "config.clusters='x': "),
  ("clusters", ("pipette-a100:2,uneven=3",), "config.clusters=.*uneven twice"),
  ("seeds", (), r"needs config.seeds"),
])
def test_invalid_key_of_the_study_is_named(key, value, message):
  config = config_of.get_config("test").to_dict() | {key: value}
  with pytest.raises(ValueError, match=message):
    registry.find(config).run(config)


def test_move_of_an_order_reaches_each_kind():
  order = list("abcde")
  found = {
    "".join(models._moved(order, np.random.default_rng(seed)))
    for seed in range(3000)
  }
  assert all(sorted(moved) == order for moved in found)
  # A run reversed, a node moved, ends swapped, a run moved, also reversed.
  assert found >= {"adcbe", "bcdae", "aecdb", "cdabe", "cdbae"}


def test_speed_ups_are_ratios_of_the_same_case():
  """Pipette is missing in the last case, and says nothing in the first."""
  seconds = {"pipette": (1.0, 2.0, 4.0), "amp": (2.0, 2.0, 20.0, 9.0)}
  said = {"pipette": (None, 3.0, 4.0), "amp": (1.0, 4.0, 5.0, 9.0)}
  pipette, amp = study._speed_ups([
    {"cluster": "c", "links": i % 2, "model": i // 2, "chooser": name,
     "seconds": seconds[name][i], "said_s": said[name][i]}
    for name in seconds for i in range(len(seconds[name]))
  ])
  assert (amp["over"], amp["cases"], amp["said"]) == ("amp", 3, 0.75)
  assert [amp[key] for key in ("least", "median", "most")] == [1, 2, 5]
  assert (pipette["median"], pipette["cases"], pipette["said"]) == (1, 3, 1.25)
