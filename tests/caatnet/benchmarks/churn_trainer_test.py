"""Worker that trains under faults: its lines, and bits of its parameters."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.benchmarks.elastic import churn_trainer
from parallel.peers.membership.leases import SampleLeases


def _run(params):
  """Returns a run at revision 7, in which 90 samples are used."""
  newest = types.SimpleNamespace(
    number=7, digest="d", leases=SampleLeases(end=100, free=((3, 13),))
  )
  state = types.SimpleNamespace(outer={"params": params})
  return types.SimpleNamespace(
    swarm=types.SimpleNamespace(newest=newest),
    peer=types.SimpleNamespace(state=state),
  )


def test_round_is_a_line_and_a_command_flips_one_bit_once(capsys):
  params = {"a": jnp.arange(1.0, 4.0), "b": jnp.ones((2, 2)), "c": jnp.ones(0)}
  before = [np.array(x).view(np.uint32) for x in jax.tree.leaves(params)]
  reporter = churn_trainer._Reporter()

  def flipped():
    reporter(_run(params))
    changed = [
      np.array(x).view(np.uint32) ^ y
      for x, y in zip(jax.tree.leaves(params), before, strict=True)
    ]
    return sorted(np.concatenate([x.ravel() for x in changed]))[-2:]

  assert flipped() == [0, 0]
  reporter.spoils.set()
  assert flipped() == [0, 1]
  assert not reporter.spoils.is_set()
  assert flipped() == [0, 1]
  for line in capsys.readouterr().out.splitlines():
    assert json.loads(line) == {"revision": 7, "digest": "d", "samples": 90}
