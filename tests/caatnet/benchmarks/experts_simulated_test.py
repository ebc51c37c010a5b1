"""Engine of experts and its simulator: hits, and times of loads."""

import numpy as np
import pytest

from caatnet.benchmarks.serving import experts_simulated
from caatnet.inference.batches import Sizes
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.executor import Load, Step
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies.experts import Experts
from caatnet.serving.scheduler.scheduler import Scheduler
from configs.benchmark import experts as config_of
from parallel.memory.slots import Slots
from tests.caatnet.benchmarks.printed import rows_of

# A step without requests.
STEP = Step(
  0, [], np.arange(1), np.zeros(1, np.int32), (), np.zeros((1, 1), np.int32),
  (), np.arange(0), np.arange(0),
)


class Times:
  """One second per step, and a tenth more per token of a chunk."""

  def step_s(self, contexts, chunks):
    return 1 + 0.1 * sum(length for _, length in chunks)


def served(simulator, prefetch, seed):
  """Returns records of 40 requests for 6 experts, and the number of loads."""
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
  return watched, slots.counts.loads


@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_times_of_loads_add_up_to_those_of_the_simulator(
  seed, prefetch, rate, steps_first
):
  rng, work_s = np.random.default_rng(seed), []

  def drawn(load):
    work_s.append(float(rng.uniform(1, 9)))
    return work_s[-1], work_s[-1]

  simulator = Simulator(
    Times(), load_s=drawn, load_rate=rate, steps_first=steps_first
  )
  watched, num_loads = served(simulator, prefetch, seed)
  load_s, exposed_s = watched.loads_s().T
  assert len(load_s) == num_loads > 6
  # Loads run one after another, also if several are under way, and progress
  # more slowly while a step runs.
  np.testing.assert_allclose(
    exposed_s + rate * (load_s - exposed_s), work_s, rtol=1e-9
  )
  assert sum(work_s) == pytest.approx(simulator.loaded_s)
  assert sum(exposed_s) == pytest.approx(simulator.exposed_s)
  assert 0 < sum(exposed_s) < simulator.loaded_s
  assert sum(map(sum, watched.step_s().values())) == pytest.approx(
    simulator.busy_s
  )


@pytest.mark.parametrize("rate", [1.0, 0.6, 0.3])
def test_rate_of_loads_during_steps_is_found_in_their_times(rate):
  simulator = Simulator(
    Times(), load_s=lambda load: (3.0, 3.0), load_rate=rate
  )
  watched, _ = served(simulator, 2, 0)
  found = experts_simulated._rate_during_steps(*watched.loads_s().T)
  assert found == pytest.approx(rate)
  # Of loads without steps, nothing is known.
  assert experts_simulated._rate_during_steps(np.ones(3), np.ones(3)) == 1.0


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


@pytest.mark.parametrize("steps_first", [False, True])
def test_load_that_ends_within_a_step_is_seen_at_its_end_or_at_the_steps(
  steps_first
):
  simulator = Simulator(
    Times(), load_s=lambda load: (0.25, 0.25), steps_first=steps_first
  )
  simulator.submit(STEP)  # one second
  simulator.load(Load("e", 0))
  if not steps_first:
    assert simulator.wait(0.1) == []
    assert simulator.now() == 0.1
    (event,) = simulator.wait(0.5)
    assert event.load
    assert simulator.now() == event.time_s == 0.25
    (event,) = simulator.wait(9.0)
    assert event.step
    assert simulator.now() == event.time_s == 1.0
  else:
    load, step = simulator.wait(0.1)
    assert load.load
    assert load.time_s == 0.25
    assert step.step
    assert simulator.now() == step.time_s == 1.0
  assert simulator.wait(3.0) == []
  assert simulator.now() == 3.0


def test_hits_of_one_request_at_a_time_are_simulated_exactly(
  tmp_path, monkeypatch, capsys
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
  printed = capsys.readouterr().out
  assert f"random ones {found['rate']:.1f} per second" in printed
  row, _ = rows_of(printed)
  mean, p99 = (
    [f"{1e3 * real[key]:.2f}", f"{1e3 * simulated[key]:.2f}",
     f"{simulated[key] / real[key]:.3f}"]
    for key in ("exposed_mean_s", "exposed_p99_s")
  )
  assert row == ["one at a time", one["eviction"], *(
    " ".join(map(str, side[key])) for key in ("hits", "loads")
    for side in (real, simulated)
  ), *mean, *p99]


def test_requests_that_exceed_the_context_are_refused():
  config = config_of.get_config("simulated_test")
  config.benchmark.tokens = 10**9
  message = "tokens=1000000000 exceed config.inference.context="
  with pytest.raises(ValueError, match=message):
    experts_simulated.run(config)
