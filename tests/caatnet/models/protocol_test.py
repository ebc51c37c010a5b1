"""Defaults of the protocol of models."""

from jax.sharding import PartitionSpec as P

from caatnet.models.graph import GraphModel
from caatnet.models.protocol import (
  Parameter,
  PipelineParts,
  Reduction,
  continues_text,
)
from parallel.axes import Axis


def test_defaults_of_the_protocol_are_those_of_a_plain_matrix():
  plain = Parameter(P(), 0, "float32")
  assert (plain.decays, plain.uses, plain.regathered, plain.stage_dim,
          plain.cast) == (True, 1, 1, None, True)
  assert Reduction("forward", "float32", (1,)).kind == "all_reduce"
  assert not PipelineParts("a", None, None, None).together
  assert not continues_text(
    GraphModel("gcn", 10, 3, (4, 5), 8, "float32", Axis("tensor", 1))
  )
