"""Fixtures of tests of benchmarks."""

import concurrent.futures

import pytest


@pytest.fixture(scope="module")
def pool():
  """Threads for three peers, which wait for each other."""
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    yield pool
