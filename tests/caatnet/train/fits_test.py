"""A run that cannot fit is refused before anything is allocated."""

import re

import jax
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train import fits, loop
from configs.caatnet import tiny
from parallel.base import available


def make(overrides, mesh=None):
  config = override(tiny.get_config("test"), overrides)
  return experiments.build(config, mesh)


@pytest.mark.parametrize(("overrides", "mesh"), [
  ("parallel.data=2 parallel.tensor=4", {"data": 2, "tensor": 2}),
  ("parallel.data=4 zero.scheme=zero3", {"data": 4}),
  ("parallel.worker=2 parallel.data=2 outer.algorithm=diloco",
   {"worker": 2, "data": 1}),
])
def test_needed_bytes_are_those_of_the_arrays(overrides, mesh, monkeypatch):
  experiment = make(overrides, mesh)
  (device, *_) = devices = experiment.program.layout.mesh.local_devices
  state = experiment.init_state()
  held = sum(
    shard.data.nbytes
    for x in (*jax.tree.leaves(state), *jax.tree.leaves(state.params))
    for shard in x.addressable_shards if shard.device == device
  )
  for spare in (0, -1):
    limit = held * len(devices) + spare
    monkeypatch.setattr(available, "limit_bytes", lambda n=limit: n)
    if spare:
      with pytest.raises(ValueError, match="the run needs at least"):
        fits.check(experiment)
    else:
      fits.check(experiment)


def test_a_run_that_cannot_fit_leaves_no_folder(tmp_path):
  experiment = make("model.width=65536 model.ffn_width=262144")
  with pytest.raises(ValueError, match=r"Use a smaller config\.model"):
    loop.train(experiment, tmp_path / "run", quiet=True)
  assert not (tmp_path / "run").exists()


def test_message_has_the_gigabytes_of_state_and_gradients(monkeypatch):
  """AdamW has two moments, so the state is three times the gradients."""
  experiment = make("model.width=16384 model.ffn_width=65536")
  devices = len(experiment.program.layout.mesh.local_devices)
  state, params = (
    sum(x.size * 4 / devices for x in jax.tree.leaves(tree)) / 1e9
    for tree in (
      experiment.abstract_state(), experiment.abstract_state().params
    )
  )
  monkeypatch.setattr(available, "limit_bytes", lambda: 4_000_000_000)
  with pytest.raises(ValueError, match="the run needs") as error:
    fits.check(experiment)
  found = re.findall(r"([\d.]+) GB", str(error.value))
  assert list(map(float, found)) == pytest.approx(
    [devices * (state + params), state, params, 4.0], abs=0.06
  )
