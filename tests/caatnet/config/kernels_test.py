"""Selection of kernels for the norms of a model."""

import pytest

from caatnet.config import experiments, sections
from caatnet.config.context import ModelContext
from caatnet.config.model import MODELS
from configs.caatnet import tiny
from parallel.kernels import evidence

KERNELS = ("tpu", "reference")
STEPS = {
  ("chip", "add_norm"): {1.0: 0.9, 0.5: 1.1},
  ("chip", "ring_all_reduce"): {0.5: 1.1},
}


@pytest.mark.parametrize(
  ("chip", "p", "route", "used"),
  [
    ("chip", 1.0, "psum", True),
    ("chip", 0.5, "psum", False),
    ("chip", 0.5, "ring_kernel", True),  # selected by name
    ("another", 0.5, "psum", True),
    (None, 0.5, "psum", True),  # config.kernels is not "auto"
  ],
)
def test_auto_uses_kernels_that_make_the_step_faster(
  monkeypatch, chip, p, route, used
):
  monkeypatch.setattr(evidence, "STEP_WITH_KERNEL", STEPS)
  config = tiny.get_config("test")
  built = experiments.build(config)
  context = ModelContext(
    "tpu", built.program.layout.tensor, KERNELS, chip, built.data,
    dict(config.sync) | {"p": p, "route": route},
  )
  model = sections.build_selected("model", MODELS, config.model, context)
  assert model.config.kernels == (KERNELS if used else ("reference",))


def test_fractions_of_both_projections_count_equally(monkeypatch):
  """The mean of 0.9 and 0.3 is that of a slower step; neither is by itself."""
  monkeypatch.setattr(evidence, "STEP_WITH_KERNEL", {
    ("chip", "add_norm"): {0.9: 0.8, 0.6: 1.1, 0.3: 0.7},
  })
  config = tiny.get_config("test")
  built = experiments.build(config)
  for fractions, used in (((0.9, 0.3), False), ((0.9, 0.8), True)):
    keys = {f"p_{name}": (p,) for name, p in
            zip(("attention", "mlp"), fractions, strict=True)}
    context = ModelContext(
      "tpu", built.program.layout.tensor, KERNELS, "chip", built.data,
      dict(config.sync) | keys,
    )
    model = sections.build_selected("model", MODELS, config.model, context)
    assert model.config.kernels == (KERNELS if used else ("reference",))
