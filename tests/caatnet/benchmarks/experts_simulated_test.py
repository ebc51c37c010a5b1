"""Engine of experts and its simulator: hits, and times of loads."""

import numpy as np
import pytest

from caatnet.benchmarks.serving import experts_simulated
from caatnet.inference.batches import Sizes
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies.experts import Experts
from caatnet.serving.scheduler.scheduler import Scheduler
from configs.benchmark import experts as config_of
from parallel.memory.slots import Slots


class Times:
  """One second per step, and a tenth more per token of a chunk."""

  def step_s(self, contexts, chunks):
    return 1 + 0.1 * sum(length for _, length in chunks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_exposed_times_add_up_to_those_of_the_simulator(seed, prefetch):
  rng = np.random.default_rng(seed)
  simulator = Simulator(
    Times(), load_s=lambda load: (float(rng.uniform(1, 9)),) * 2
  )
  watched = experts_simulated._Watched(simulator, lambda *sizes: len(sizes[0]))
  slots, pages = Slots(3, "lookahead"), Pages(64, page_size=4)
  engine = Engine(
    Scheduler(
      Limits(), Experts(slots, 5.0, prefetch=prefetch), pages,
      HostCache(0, 4, reserve=False), simulator.costs,
    ),
    watched,
  )
  experts = np.random.default_rng(seed).integers(6, size=40)
  replay(engine, [
    Request(i, [i + 1] * 4, 5, expert=f"e{expert}", arrival_s=4.0 * i)
    for i, expert in enumerate(experts)
  ])
  exposed = watched.exposed_s()
  assert len(exposed) == slots.counts.loads > 6
  # Loads run one after another, also if several are under way.
  assert sum(exposed) == pytest.approx(simulator.exposed_s)
  assert 0 < sum(exposed) < simulator.loaded_s
  assert sum(map(sum, watched.step_s().values())) == pytest.approx(
    simulator.busy_s
  )


def test_step_of_other_sizes_takes_the_time_of_the_nearest_number_of_tokens():
  seconds = {
    Sizes(decodes=1, chunks=4, length=2, pages=1): [1.0],  # 9 tokens
    Sizes(decodes=9, chunks=0, length=0, pages=1): [2.0],
    Sizes(decodes=0, chunks=1, length=64, pages=1): [3.0],
  }
  asked = Sizes(decodes=0, chunks=2, length=16, pages=1)  # 32 tokens
  profile = experts_simulated._Profile(seconds, lambda *sizes: asked, seed=0)
  assert profile.step_s(np.zeros(0), []) == 1.0
  asked = Sizes(decodes=8, chunks=1, length=32, pages=1)  # 40 tokens
  assert profile.step_s(np.zeros(0), []) == 3.0


def test_hits_of_one_request_at_a_time_are_simulated_exactly(
  tmp_path, monkeypatch
):
  # The programs of this test are not kept.
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
  config = config_of.get_config("simulated_test")
  config.experts.path = str(tmp_path / "library")
  found = experts_simulated.run(config)
  one, random = found["rows"]
  assert (one["arrivals"], random["arrivals"]) == ("one at a time", "random")
  real, simulated = one["engine"], one["simulated"]
  for key in ("hits", "misses", "loads"):
    assert real[key] == simulated[key]
  assert real["hits"][0] + real["misses"][0] == config.benchmark.requests
  assert 0 < real["misses"][0] < config.benchmark.requests
  # Nothing is computed while the only request waits for its expert.
  for side in (real, simulated):
    assert side["exposed_mean_s"] == pytest.approx(side["load_s"])
  assert sum(random["engine"]["hits"]) > 0


@pytest.mark.parametrize(("key", "value", "message"), [
  ("evictions", (), r"evictions=\(\) must have one or more"),
  ("tokens", 10**9, "tokens=1000000000 exceed config.inference.context="),
])
def test_values_that_cannot_be_served_are_refused(key, value, message):
  config = config_of.get_config("simulated_test")
  config.benchmark[key] = value
  with pytest.raises(ValueError, match=message):
    experts_simulated.run(config)
