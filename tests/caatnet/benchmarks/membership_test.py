"""Benchmark of the membership protocol: small worlds, and their rows."""

import time

import pytest

from caatnet.benchmarks.elastic import membership
from configs.benchmark import membership as config_of


def searched(*worlds, most=10**6):
  config = config_of.get_config("test")
  config.benchmark.worlds, config.benchmark.most = worlds, most
  return membership.run(config)["rows"]


def test_worlds_are_searched_and_described(capsys):
  world = {"peers": 2, "rounds": 1, "least": 2}
  start = time.perf_counter()
  calm, crash = searched(world | {"quorum": 2}, world | {"crashes": 1})
  passed = time.perf_counter() - start
  assert (calm["peers"], calm["rounds"]) == (2, 1)
  assert (calm["accidents"], crash["accidents"]) == ("quorum 2", "1 crashes")
  assert 0 < calm["states"] < crash["states"]
  for row in (calm, crash):
    assert row["complete"]
    assert (row["problem"], row["trace"]) == ("", [])
    assert 0 < row["seconds"] <= passed
  lines = capsys.readouterr().out.splitlines()
  (line,) = (line for line in lines if "1 crashes" in line)
  assert line.split("│")[5].strip() == "yes"
  assert not line.split("│")[7].strip()
  cut, = searched(world, most=5)
  assert world == {"peers": 2, "rounds": 1, "least": 2}  # unchanged
  assert not cut["complete"]
  assert cut["accidents"] == "none"
  lines = capsys.readouterr().out.splitlines()
  assert any([x.strip() for x in line.split("│")[5:6]] == ["no"]
             for line in lines)


def test_unknown_accident_is_named():
  with pytest.raises(ValueError, match=r"worlds: 'crash' must be one of"):
    searched({"peers": 2, "rounds": 1, "least": 2, "crash": 1})
