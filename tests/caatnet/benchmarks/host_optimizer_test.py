"""Benchmark of the host optimizer: complete runs, and its predictions."""

import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.benchmarks.memory import host_optimizer, measured_tiers
from configs.benchmark import host_optimizer as host_optimizer_config
from parallel.hardware import tiers
from parallel.memory.host_optimizer import MOVED_BYTES, AdamW
from tests.caatnet.benchmarks.printed import rows_of

OURS = AdamW()
SETTINGS = {
  "lr": measured_tiers.LEARNING_RATE, "betas": (OURS.beta_1, OURS.beta_2),
  "weight_decay": OURS.weight_decay, "fused": True,
}
# What the rivals' script uses of torch; a step takes ten milliseconds.
TORCH = f"""
SETTINGS = {SETTINGS}
""" + """
import time
import types

__version__ = "9.9"
threads = []
set_num_threads = threads.append

def ones(size):
  print("a library prints something")
  return [1.0] * size

def full(shape, value):
  return [value] * shape[0]

class AdamW:
  def __init__(self, parameters, **settings):
    (self.parameter,) = parameters
    assert settings == SETTINGS

  def step(self):
    assert threads == [2]
    assert len(self.parameter.grad) == len(self.parameter.data)
    time.sleep(0.01)

nn = types.SimpleNamespace(Parameter=lambda x: types.SimpleNamespace(data=x))
optim = types.SimpleNamespace(AdamW=AdamW)
"""


def quantity(value):
  return tiers.Quantity(value=value, low=value, high=value, source="a test")


@pytest.fixture
def host(tmp_path):
  """DRAM that reads and writes 10 GB/s, and a file of 1 and 0.5 GB/s."""
  common = {"capacity_bytes": quantity(1e9), "latency_s": quantity(0.0),
            "duplex": False}
  return tiers.checked(tiers.Host(
    name="test", source="a test", links=(),
    device_link=tiers.SharedLink(
      name="link", read=quantity(1e9), write=quantity(1e9), duplex=True
    ),
    tiers=(
      tiers.Tier(name="dram", kind="dram", node=0, read=quantity(1e10),
                 write=quantity(1e10), **common),
      tiers.Tier(name="file", kind="file", path=str(tmp_path / "tier"),
                 read=quantity(1e9), write=quantity(5e8), **common),
    ),
  ))


def test_a_run_measures_all_subjects():
  config = host_optimizer_config.get_config("test")
  (row,) = host_optimizer.run(config)["rows"]
  assert row["seconds"].keys() == row["of_triad"].keys() == {"ours", "optax"}
  for name, (seconds,) in row["seconds"].items():
    share = MOVED_BYTES * row["size"] / seconds / row["triad"][0]
    assert row["of_triad"][name] == [pytest.approx(share)]


def test_a_run_measures_all_placements(host, tmp_path):
  config = host_optimizer_config.get_config("test")
  path = tmp_path / "tiers.json"
  path.write_text(tiers.to_json(host))
  config.benchmark.tiers = str(path)
  rows = host_optimizer.run(config)["placements"]
  in_file = {r["placement"]: sum(r["file_share"].values()) / 4 for r in rows}
  assert in_file == {
    "dram": 0, "planned": pytest.approx(0.5), "interleaved": 0.5, "file": 1
  }
  for row in rows:
    (seconds,) = row["seconds"]
    assert row["median_s"] == seconds
    assert row["predicted_s"] > 0


def test_predictions_are_bytes_over_rates(host):
  found = host_optimizer.plans(1000, host, dram_share=0.5)
  seconds = {name: s for name, (_, s) in found.items()}
  file = 16_000 / 1e9 + 12_000 / 5e8
  assert seconds == {
    "dram": pytest.approx(28_000 / 1e10),
    "file": pytest.approx(file),
    "interleaved": pytest.approx(file / 2),
    # Gradients, which are only read, and one of the other arrays.
    "planned": pytest.approx(8_000 / 1e9 + 4_000 / 5e8),
  }
  placed = found["planned"][0].tiers
  assert placed[(*host_optimizer._WAY, "gradients")]["file"] == 1


def test_predictions_are_measured_passes(host):
  """Between sizes by interpolation, below the smallest its seconds."""
  dram, file = host.tiers
  passes = tuple(
    tiers.Pass(size_bytes=size, read_s=read, write_s=write)
    for size, read, write in ((8e3, 0.1, 0.2), (24e3, 0.3, 0.8))
  )
  host = host.model_copy(update={
    "tiers": (dram, file.model_copy(update={"passes": passes}))
  })

  def seconds(size):
    found = host_optimizer.plans(size, host, dram_share=0.5)
    return {name: pytest.approx(s) for name, (_, s) in found.items()}

  # 16 bytes are read and 12 written per element.
  assert seconds(1000) == {
    "dram": 28_000 / 1e10, "file": 0.2 + 0.35, "interleaved": 0.1 + 0.2,
    "planned": 0.1 + 0.2,
  }
  assert seconds(10_000)["file"] == 0.3 * 160 / 24 + 0.8 * 120 / 24
  # Half of the rates: twice the time.
  file = host.tiers[1]
  slow = file.at(file.read.value / 2, file.write.value / 2)
  assert slow.pass_s(16e3, 12e3) == pytest.approx(2 * file.pass_s(16e3, 12e3))


def test_other_tiers_are_an_error(host):
  two = host.model_copy(update={"tiers": host.tiers[:1]})
  with pytest.raises(ValueError, match="one of kind file"):
    host_optimizer.plans(1000, two, 0.5)


def test_rivals_without_torch_are_an_error(tmp_path):
  config = host_optimizer_config.get_config("test")
  config.benchmark.rivals = str(tmp_path / "python")
  with pytest.raises(ValueError, match="cannot be run"):
    host_optimizer.run(config)
  script = tmp_path / "python"
  script.write_text(f"#!{sys.executable}\n")  # exits immediately
  script.chmod(0o755)
  with pytest.raises(ValueError, match="needs torch"):
    host_optimizer.run(config)


def test_rivals_are_measured_with_the_same_threads(tmp_path):
  (tmp_path / "torch.py").write_text(TORCH)
  python = tmp_path / "python"
  python.write_text(
    f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n'
  )
  python.chmod(0o755)
  config = host_optimizer_config.get_config("test")
  config.benchmark.rivals, config.benchmark.threads = str(python), 2
  start = time.perf_counter()
  (row,) = host_optimizer.run(config)["rows"]
  passed = time.perf_counter() - start
  assert row["versions"] == {"torch": "9.9"}
  assert row["seconds"].keys() == {"ours", "optax", "torch"}
  (seconds,) = row["seconds"]["torch"]
  assert 0.01 <= seconds < passed


def test_compared_optimizers_take_the_same_steps():
  """From the same weights, for the gradients of the benchmark and others."""
  ours, take = host_optimizer._made(6, 1), host_optimizer._optax(6)
  measured_tiers.step(ours)
  theirs = take()
  np.testing.assert_allclose(ours.weights, theirs, rtol=1e-6)
  assert (theirs < 1).all()
  for size in (1e-2, -1e-3):
    ours.gradients.fill(size)
    measured_tiers.step(ours)
    theirs = take(jnp.full(6, size))
    np.testing.assert_allclose(ours.weights, theirs, rtol=1e-6)


def test_tables_have_rates_and_shares(capsys):
  host_optimizer._print([{
    "size": 1_000_000, "seconds": {"ours": [0.002, 0.004, 0.003]},
    "of_triad": {"ours": [0.5, 1.0, 0.75]},
  }])
  # 28 bytes of each element in 3 ms.
  assert rows_of(capsys.readouterr().out) == [
    ["1,000,000", "ours", "3.0 (2.0 to 4.0)", "9.3", "75 (50 to 100)"]
  ]
  host_optimizer._print_placements([{
    "size": 1000, "placement": "planned", "seconds": [0.5, 0.25],
    "median_s": 0.375, "predicted_s": 0.25,
    "file_share": {"weights": 1.0, "gradients": 0.5},
  }])
  assert rows_of(capsys.readouterr().out) == [[
    "1,000", "planned", "75%", "375.0 (250.0 to 500.0)", "250.0", "1.50"
  ]]
