"""Service of clients over time, and drawn arrivals."""

import numpy as np
import pytest

from caatnet.serving.requests import Request
from caatnet.studies.serving import fairness
from configs.serving import fairness as fairness_config


def served(number, arrival_s, scheduled_s, times, prompt=8, hits=3):
  request = Request(number, [1] * prompt, 9, arrival_s=arrival_s)
  request.num_hits, request.scheduled_s = hits, scheduled_s
  request.take(np.ones(len(times), np.int32), np.array(times))
  return request


def test_service_counts_tokens_read_once_and_drawn_twice():
  requests = [served(0, 0.0, 1.0, [2.0, 3.0]), served(1, 1.0, 2.0, [3.0])]
  times, amounts = fairness.service_curve(requests)
  assert times.tolist() == [1, 2, 3]
  # 5 tokens are read at 1 s; 5 and a drawn one at 2 s; two are drawn at 3 s.
  assert amounts.tolist() == [5, 5 + 5 + 2, 5 + 5 + 2 + 4]
  times, waiting = fairness.queue_length_curve(requests)
  assert (times.tolist(), waiting.tolist()) == ([0, 1, 2], [1, 1, 0])
  curve = fairness.service_curve(requests)
  assert fairness.evaluate_curve(
    curve, np.array([0.5, 1, 1.5, 3, 9])
  ).tolist() == [
    0, 5, 5, 16, 16
  ]


def test_difference_counts_common_backlog_only():
  times = np.arange(6.0)
  first = times, np.array([0.0, 10, 10, 30, 30, 90])
  second = times, np.array([0.0, 0, 5, 5, 50, 50])
  always = times, np.ones(6)
  assert fairness.max_service_difference(first, second, always, always) == 60
  # Ahead by 0, 10, 5, 25, -20 and 40: only 1 to 3 s count, or nothing.
  part = times, np.array([0.0, 1, 1, 1, 0, 0])
  assert fairness.max_service_difference(first, second, part, always) == 20
  assert fairness.max_service_difference(first, second, always, part) == 20
  none = times, np.zeros(6)
  assert fairness.max_service_difference(first, second, none, always) == 0


def test_clients_arrive_at_their_rates_with_their_lengths():
  common = {"prompt": 100, "output": 10, "shared": 32}
  sections = {
    "a": common | {"requests": 400, "rate": 4.0, "priority": 1},
    "b": common | {"requests": 300, "rate": 0, "priority": 2, "shared": 16},
  }
  arrivals, clients = fairness.draw_arrivals(sections, seed=0)
  assert [a.number for a in arrivals] == list(range(700))
  times = [a.time_s for a in arrivals]
  assert times == sorted(times)
  of = {
    name: [a for a in arrivals if clients[a.number][0] == name]
    for name in sections
  }
  assert {clients[a.number] for a in of["b"]} == {("b", 2.0)}
  assert {a.time_s for a in of["b"]} == {0.0}
  assert of["a"][-1].time_s == pytest.approx(100, rel=0.2)
  for name, shared in (("a", 32), ("b", 16)):
    prompts = [a.prompt - shared for a in of[name]]
    outputs = [a.output for a in of[name]]
    assert (min(prompts), max(prompts)) == (
      pytest.approx(51, abs=2), pytest.approx(148, abs=2)
    )
    assert (min(outputs), max(outputs)) == (5, 14)
    blocks = [a.blocks for a in of[name]]
    assert {b[0] for b in blocks} == {list(sections).index(name)}
    unique = [block for b in blocks for block in b[1:]]
    assert len(set(unique)) == len(unique)
    assert not {0, 1} & set(unique)
    assert all(
      len(a.blocks) == 1 + -(-(a.prompt - shared) // shared)
      and a.block_size == shared for a in of[name]
    )


@pytest.mark.parametrize(("backlogged", "words"), [
  ((), "config.clients .* two .*"), (("long",), "config.clients .* has long"),
])
def test_clients_that_cannot_be_compared_are_refused(backlogged, words):
  config = fairness_config.get_config("test")
  for name, client in config.clients.items():
    client.backlogged = name in backlogged
  with pytest.raises(ValueError, match=words):
    fairness.run(config.to_dict())


@pytest.mark.parametrize("name", ["short", "light"])
@pytest.mark.parametrize("key", ["shared", "prompt", "output"])
def test_clients_of_which_no_request_fits_are_refused(name, key):
  config = fairness_config.get_config("test")
  config.policies = ("vtc",)
  config.hardware.pages = 200
  for client in config.clients.values():
    client.requests = 2
    client.shared, client.prompt, client.output = 16, 16, 4
  config.clients[name][key] = 10_000
  words = rf"config\.clients\.{name}\.{key}=10000.* config\.hardware\.pages="
  with pytest.raises(ValueError, match=words):
    fairness.run(config.to_dict())
