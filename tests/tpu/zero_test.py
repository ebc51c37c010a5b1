"""ZeRO partitions compiled ahead of time for TPUs: `make test-tpu`."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from configs.caatnet import tiny
from parallel.axes import Axis, make_mesh
from parallel.collectives import reduce_scatter
from parallel.ledger import compiled, hlo, targets

THREE_LEVELS = (
  "model.width=256 model.num_heads=8 model.ffn_width=512 model.remat=full "
  "model.dtype=bfloat16 parallel.tensor=1 parallel.data=8 "
  "zero.levels=node:2,pair:2,chip:2 train.accumulation=2 data.batch_size=16"
)


def analyse(overrides):
  target = targets.resolve("tpu:v5p:2x2x2")
  config = override(
    tiny.get_config("demo"), f"{THREE_LEVELS} {overrides}"
  )
  experiment = experiments.build(config, None, list(target.devices))
  return study.analyse(experiment, target)


@pytest.mark.parametrize("scheme", ["frontier3", "zeropp"])
def test_step_sends_the_bytes_of_the_formula(scheme):
  result = analyse(f"zero.scheme={scheme}")
  rows = result["partition"]["bytes"]
  norms = [r for r in rows if r["axes"] == "node,pair,chip"]
  assert sum(r["lowered"] for r in norms) < 100
  rows = [r for r in rows if r not in norms]
  made = [r for r in rows if r["formula"] or r["lowered"]]
  assert len(made) > 5
  assert all(r["lowered"] == r["formula"] for r in made), made
  # XLA pads scatters to tiles; smaller scatters become all-reduces.
  for r in made:
    assert r["compiled"] == pytest.approx(r["formula"], rel=0.05, abs=2e5), r
  others = [r for r in rows if r not in made]
  total = sum(r["formula"] for r in rows)
  assert sum(r["compiled"] for r in others) < 0.01 * total, others
  state = result["memory"]["parameters"] + result["memory"]["optimizer state"]
  stored = result["partition"]["memory"]["state (arguments)"]
  assert stored < state < stored + 100  # the step counters


@pytest.mark.parametrize(("name", "size"), [("node", 8), ("chip", 2)])
def test_large_reduce_scatter_is_not_lowered_to_an_all_reduce(name, size):
  """Scatters the major dim; XLA all-reduces when a minor dim is scattered."""
  target = targets.resolve("tpu:v5p:4x4x4")
  axes = {n: Axis(n, s, s) for n, s in (("node", 8), ("pair", 4), ("chip", 2))}
  mesh = make_mesh(axes, target.devices)
  everywhere = P(("node", "pair", "chip"))
  mapped = jax.shard_map(
    lambda x: reduce_scatter(x, axes[name]),
    mesh=mesh, in_specs=everywhere, out_specs=everywhere,
  )
  x = jax.ShapeDtypeStruct(
    (64, 6144 * 6144), "float32", sharding=NamedSharding(mesh, everywhere)
  )
  module = hlo.parse(jax.jit(mapped).lower(x).compile().as_text())
  made = compiled.collectives(module, mesh)
  assert [(entry.kind, entry.axes, entry.bytes) for entry in made] == [
    ("reduce_scatter", (name,), 4 * 6144 * 6144)
  ]
