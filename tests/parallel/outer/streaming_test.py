"""Streaming DiLoCo: all pairs of its options, compared with its equation."""

import jax
import numpy as np
import optax
import pytest

from parallel.outer.fragments import fragments
from parallel.outer.optimizers import Nesterov, Optax
from parallel.outer.streaming import Streaming
from parallel.wire import Wire
from tests import pairwise
from tests.parallel.outer.equations_test import (
  MOMENTUM,
  RATE,
  adam,
  nesterov,
  streaming_by_hand,
)
from tests.parallel.outer.small_run import (
  LAYERS,
  WORKER,
  M,
  each,
  exchange,
  run,
)

OUTER = {
  "sgd": (Optax(optax.sgd(RATE)), lambda params, mean, state: (
    each(lambda p, d: p - RATE * d, params, mean), None
  )),
  "nesterov": (Nesterov(RATE, MOMENTUM), nesterov),
  "adam": (Optax(optax.adam(RATE)), adam),
}
WIRES = {
  "none": Wire(block=2), "bfloat16": Wire(dtype="bfloat16"),
  "int8": Wire("int8", 2),
}
FRAGMENTS = {  # (layers of a fragment, strided) -> layers of each
  (3, False): [[0, 1, 2], [3, 4, 5]], (3, True): [[0, 2, 4], [1, 3, 5]],
  (2, True): [[0, 3], [1, 4], [2, 5]],
}
TABLE = pairwise.rows(
  {
    "optimizer": tuple(OUTER), "wire": tuple(WIRES),
    "overlap": ((0,), (2,), (3, 4, 3)), "fragments": tuple(FRAGMENTS),
    "pieces": (1, 2), "keep": (0.0, 0.25), "weights": ((), (1.0, 2.0, 5.0)),
  },
  # An exchange in pieces overlaps with as many steps. Adam divides elements by
  # their own size, so the rounding of a block with one scale is not small.
  lambda row: row["pieces"] > max(1, min(row["overlap"]))
  or (row["optimizer"] == "adam" and row["wire"] == "int8"),
)


@pytest.mark.rotated
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_follow_the_equation(row):
  sync_every, num_steps = 8, 20
  optimizer, step = OUTER[row["optimizer"]]
  of_fragment, strided = row["fragments"]
  loop = Streaming(
    WORKER, sync_every, optimizer,
    exchange(WIRES[row["wire"]], weights=row["weights"]),
    fragments({"blocks": LAYERS}, of_fragment, strided), row["overlap"],
    row["keep"], row["pieces"],
  )
  share = np.array(row["weights"] or (1.0,) * M)
  taus = row["overlap"] * (M // len(row["overlap"]))
  expected = streaming_by_hand(
    sync_every, FRAGMENTS[row["fragments"]], taus, row["keep"], num_steps, step,
    share / share.sum(),
  )
  atol = {"none": 3e-5, "bfloat16": 2e-2, "int8": 2e-2}[row["wire"]]
  found = run(loop, num_steps)
  for (params, _, phi), (theta, outer) in zip(found, expected, strict=True):
    for ours, theirs in zip(
      jax.tree.leaves((params, phi)), jax.tree.leaves((theta, outer)),
      strict=True,
    ):
      np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(("values", "message"), [
  ({"overlap": (1, 2)}, r"overlap=\(1, 2\) must have one value, or one for"),
  ({"overlap": (-1,)}, r"overlap=\(-1,\) must lie in \[0, sync_every=8\)"),
  ({"overlap": (8,)}, r"overlap=\(8,\) must lie in \[0, sync_every=8\)"),
  ({"overlap": (0, *[2] * (M - 1))}, "must be all zero or all positive"),
  ({"overlap": (4,), "pieces": 0}, "pieces=0 must be at least 1"),
  ({"overlap": (1,), "pieces": 2}, "pieces=2 must be at least 1 and at most o"),
  ({"overlap": (4,), "pieces": 3}, "at most .* and the 2 steps between two"),
  ({"keep": 1.5}, r"keep=1.5 must lie in \[0, 1\]"),
])
def test_values_out_of_range_are_refused(values, message):
  cut = fragments({"blocks": LAYERS}, 3, False)  # 2 of layers and the rest
  with pytest.raises(ValueError, match=message):
    Streaming(WORKER, 8, OUTER["sgd"][0], exchange(Wire()), cut, **values)
