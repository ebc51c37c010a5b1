"""Report of a composition, from results as plain data."""

import pytest

from caatnet.composition.report import report

KINDS = ("python", "c")


def seed(routed, **changes):
  """Returns the result of a seed whose other losses are 2."""
  return {
    "losses": {
      "base": {"python": 2.0, "c": 2.0}, "same": {"python": 1.0, "c": 2.0},
      "routed": {"python": routed, "c": routed},
    },
    "accuracy": {
      "128": {"python": 1.0, "c": 0.5}, "16": {"python": 0.5, "c": 0.25},
    },
    "routed_right": {"python": 1.0, "c": 0.0},
    "parameters": {"base": 1000, "same": 1200, "router": 200},
    "forms": [],
  } | changes


def made(*seeds):
  return report({"kinds": KINDS, "seeds": seeds, "left_out": ["no rust"]})


def test_losses_are_means_over_seeds():
  losses, differences, router = made(seed(1.0), seed(1.5), seed(1.1)).tables
  assert losses.cells()[-1] == ["experts, routed", "1.200", "1.200", "1.200"]
  assert losses.cells()[1][1:] == ["1.000", "2.000", "1.500"]
  assert "expert 1,000, router 200, one model 1,200" in losses.title
  # Routed minus other models, seed by seed.
  assert differences.cells() == [
    ["base", "-0.8000", "-1.0000 to -0.5000"],
    ["one model, parameters of router and expert", "-0.3000",
     "-0.5000 to +0.0000"],
  ]
  assert router.cells() == [
    ["16", "50%", "25%", "38%"], ["128", "100%", "50%", "75%"],
    ["prompts of the losses", "100%", "0%", "50%"],
  ]


@pytest.mark.parametrize(("num", "claims"), [(2, False), (3, True)])
def test_claim_about_loss_needs_three_seeds(num, claims):
  texts = [p for p in made(*[seed(1.0)] * num).parts if isinstance(p, str)]
  assert texts[-1] == "no rust"
  assert (len(texts) == 1) == claims


def test_stored_differences_are_compared_with_whole_experts():
  """Only if the first seed has them; whole experts need no base."""
  forms = [
    {"form": "whole", "size_bytes": 4_000_000, "loss": 1.5},
    {"form": "int8", "size_bytes": 1_000_000, "loss": 1.51},
  ]
  *_, table = made(seed(1.0, forms=forms), seed(1.0)).tables
  assert table.cells() == [
    ["whole", "4,000", "250", "1.5000", "+0.0000"],
    ["int8", "1,000", "996", "1.5100", "+0.0100"],
  ]
  assert len(made(seed(1.0), seed(1.0, forms=forms)).tables) == 3
