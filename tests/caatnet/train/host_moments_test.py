"""Updates in parts equal updates at once, up to rounding in a loop."""

import functools

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.program import Layout
from caatnet.train import host_moments
from caatnet.train.state import state_shardings, state_specs
from configs.caatnet import tiny
from parallel.collectives import each_lane

SMALL = (
  "model.width=16 model.num_heads=2 model.num_kv_heads=2 model.ffn_width=24 "
  "model.vocab_size=64 model.num_layers=3 data.seq_len=8 data.batch_size=8 "
  "memory.moments=pinned_host"
)


@pytest.mark.parametrize(("overrides", "mesh"), [
  ("parallel.tensor=1", {}),
  ("parallel.tensor=2 parallel.data=2 zero.scheme=zero3 optimizer.name=sgd "
   "optimizer.warmup_steps=2", {"data": 2, "tensor": 2}),
  ("parallel.tensor=2 parallel.data=2 parallel.stage=2 train.accumulation=2",
   {"stage": 2}),
  ("parallel.tensor=1 parallel.worker=2 outer.algorithm=diloco", {}),
], ids=str)
def test_update_in_parts_equals_the_update_at_once(overrides, mesh):
  experiment = experiments.build(
    override(tiny.get_config("test"), f"{SMALL} {overrides}"), mesh
  )
  program, parts = experiment.program, (experiment.optimizer, experiment.outer)
  specs, shardings = (
    of(program, *parts) for of in (state_specs, state_shardings)
  )
  rng = np.random.default_rng(0)
  state = experiment.abstract_state()
  trees = jax.tree.map(
    lambda x, sharding: jax.device_put(
      rng.uniform(0.5, 1, x.shape).astype(x.dtype), sharding
    ),
    ((state.params, state.opt_state), state.params),
    ((shardings.params, shardings.opt_state), shardings.params),
  )

  def updated(way):
    def run(changed, params):
      return way(
        program, lambda changed, params: each_lane(
          experiment.optimizer.update, program.layout.worker, *changed, params
        ), changed, params,
      )

    return jax.jit(jax.shard_map(
      run, mesh=program.layout.mesh,
      in_specs=((specs.params, specs.opt_state), specs.params),
      out_specs=(specs.params, specs.opt_state),
    ), out_shardings=(shardings.params, shardings.opt_state))(*trees)

  at_once, in_parts = map(
    updated, (
      host_moments.apply,
      # several pieces
      functools.partial(host_moments.apply_in_parts, piece=256),
    )
  )
  found = jax.tree.map(lambda x: x.sharding, in_parts)
  assert found == (shardings.params, shardings.opt_state)
  chex.assert_trees_all_close(
    *map(jax.device_get, (in_parts, at_once)), rtol=1e-6
  )


@pytest.mark.parametrize(("moments", "on_cpu"), [
  ("pinned_host", False), ("pinned_host", True), ("device", False),
])
def test_parts_are_a_loop_only_if_moments_have_a_memory_of_their_own(
  moments, on_cpu, monkeypatch
):
  monkeypatch.setattr(Layout, "on_cpu", on_cpu)
  experiment = experiments.build(override(
    tiny.get_config("test"),
    f"{SMALL} parallel.tensor=1 memory.moments={moments}",
  ), {})
  program, state = experiment.program, experiment.abstract_state()
  specs = state_specs(program, experiment.optimizer, experiment.outer)

  def run(opt_state, params):
    return host_moments.apply(
      program, lambda x, _: jax.tree.map(lambda x: x + x, x), opt_state, params
    )

  traced = jax.make_jaxpr(jax.shard_map(
    run, mesh=program.layout.mesh, in_specs=(specs.opt_state, specs.params),
    out_specs=specs.opt_state,
  ))(state.opt_state, state.params)
  loops = [name for name in ("scan[", "while[") if name in str(traced)]
  assert bool(loops) == (moments != "device" and not on_cpu)
