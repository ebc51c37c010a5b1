"""Published models: ours computes what the reference does, and back again.

The checkpoints of `tests/fixtures/families` and their logits were made by
`tests/fixtures/make_families.py`.
"""

import pathlib

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.build import experiments
from caatnet.interop import huggingface, tensors
from caatnet.interop.source import open_source
from caatnet.train.checkpoint import Checkpointer
from configs.caatnet import base

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures/families"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
# With key/value heads that are repeated for 3 and 8 ranks, and two files.
ONE = "llama_3"
# Ranks, and the devices that carry them.
RANKS = [(1, 1), (2, 2), (3, 1), (8, 4)]
# Float32 on both sides; logits are up to 7.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def build(source, devices=1, p=1.0):
  config = base.get_config()
  config.model.update(source.section)
  config.model.dtype = "float32"
  config.parallel.tensor = source.ranks
  config.sync.p = p
  return experiments.build(config, {"tensor": devices})


def convert(folder, to, ranks=1, devices=1, **changes):
  source = open_source(folder, ranks)
  experiment = build(source, devices, **changes)
  made = huggingface.write_run(source, experiment, to)
  return experiment, made


def restore(experiment, folder):
  checkpointer = Checkpointer(folder, experiment.program)
  abstract = experiment.abstract_state()
  params, outer, *_ = checkpointer.restore_params(
    abstract.params, abstract.outer
  )
  checkpointer.close()
  return experiment.make_evaluated()(params, outer)


def compute_logits(experiment, params, tokens):
  """Logits [B, T, vocabulary], from those of all ranks."""
  program = experiment.program
  axis = program.layout.tensor.name
  mapped = jax.shard_map(
    program.model.logits, mesh=program.layout.mesh,
    in_specs=(program.specs, P()), out_specs=P(axis),
  )
  by_rank = jax.jit(mapped)(params, tokens)  # [R, B, T, V]
  joined = np.moveaxis(np.asarray(by_rank), 0, 2).reshape(*tokens.shape, -1)
  return joined[..., : program.model.config.vocab_size]


def expect_reference(family, experiment, folder):
  expected = np.load(FIXTURES / family / "logits.npz")
  logits = compute_logits(
    experiment, restore(experiment, folder), expected["tokens"]
  )
  np.testing.assert_allclose(logits, expected["logits"], **TOLERANCE)


def read_all(folder):
  """All tensors of a folder as (dtype, shape, bytes) by name."""
  found, wrong = tensors.find(folder)
  assert not wrong
  return {
    name: (x.dtype, x.shape, tensors.read(x, name).tobytes())
    for name, x in found.items()
  }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_the_reference_does(family, tmp_path):
  experiment, _ = convert(FIXTURES / family, tmp_path / "run")
  expect_reference(family, experiment, tmp_path / "run")


@pytest.mark.parametrize(("ranks", "devices"), RANKS)
def test_any_number_of_ranks_computes_the_same(ranks, devices, tmp_path):
  experiment, _ = convert(FIXTURES / ONE, tmp_path / "run", ranks, devices)
  expect_reference(ONE, experiment, tmp_path / "run")
