"""Lifetime of gathered layers in the compiled partitioned step."""

import jax
import pytest

from parallel.plans.zero import cost
from tests import users
from tests.caatnet.train.zero_test import LEVELS, make


@pytest.mark.rotated
@pytest.mark.parametrize(
  ("scheme", "remat"),
  [("zero3", "full"), ("hpz", "none"), ("zero3 zero.prefetch=True", "none")],
)
def test_no_layer_is_gathered_for_longer_than_its_use(scheme, remat):
  """Memory grows per layer by shards and activations, not by weights."""
  wide = (
    "model.width=96 model.ffn_width=512 sync.p=1.0 parallel.tensor=1 "
    f"train.accumulation=1 model.remat={remat} "
  )

  def temporaries(num_layers):
    experiment = make(
      scheme, f"{wide} model.num_layers={num_layers}", {n: 2 for n in LEVELS}
    )
    step = users.compiled(experiment.lower_step())
    return step.memory_analysis().temp_size_in_bytes, experiment.program

  (small, program), (large, _) = temporaries(3), temporaries(7)
  one_layer = cost.memory(program.layout.partition, [
    cost.Parameter(t.size)
    for t in jax.tree.leaves(program.tensors["blocks"])
  ])
  weights = 4 * sum(t.size for t in jax.tree.leaves(program.tensors["blocks"]))
  # Two sequences of 8 tokens: eight activations of the widest kind.
  activations = {"none": 8, "full": 1}[remat] * 2 * 8 * 4 * 512
  # Initial zeros, sums, and the operands of scatters.
  shards = one_layer.weights + 5 * one_layer.gradients + one_layer.secondary
  growth = (large - small) / 4
  assert growth < shards + activations
  assert growth + weights > shards + activations  # a kept layer would exceed it


def test_backward_gathers_again():
  """Covers layers in separate loops; `shards_test.py` covers shared loops."""
  p = "(0.5,1.0,0.5)"
  experiment = make("zero3", f"train.accumulation=1 sync.p_mlp={p}")
  # Emitters of fusions change no collective.
  text = experiment.lower_step().compile().as_text()
  gathers = [line for line in text.splitlines() if " all-gather(" in line]
  backward = [line for line in gathers if "transpose" in line]
  embedding = len(LEVELS)  # a lookup has no second gather
  assert len(backward) > embedding
  assert len(gathers) == 2 * len(backward) + embedding
