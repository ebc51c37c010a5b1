"""Pre-flight check of a placement on this machine."""

import platform
import shutil

import pytest

from parallel.base import available
from parallel.memory import preflight
from parallel.plans.hardware.tiers import HOSTS
from parallel.plans.placement.problem import INSTANTS

DRAM = HOSTS["large-dram"]


def here(path=None):
  """Returns this machine's DRAM or, with a path, a file on its disk."""
  (tier,) = DRAM.tiers
  changed = {"node": None}
  if path is not None:
    changed |= {"kind": "file", "path": str(path)}
  return DRAM.model_copy(update={
    "name": platform.node(), "tiers": (tier.model_copy(update=changed),),
  })


def held(size):
  return {instant: {"device": 1e18, "dram": size} for instant in INSTANTS}


def test_bytes_that_no_machine_has_are_an_error(tmp_path):
  with pytest.raises(ValueError, match=r"memory: the placement needs 10+\.0"):
    preflight.check(here(), held(1e15), 0.0)
  with pytest.raises(ValueError, match="tier: disk: the placement needs"):
    preflight.check(here(tmp_path / "tier"), held(1e18), 0.0)
  # Other machines are not checked.
  assert preflight.check(DRAM, held(1e18), 1e18) == []


def test_bytes_of_all_nodes_share_the_memory_of_the_machine():
  (tier,) = here().tiers
  card = tier.model_copy(update={"name": "cxl0", "kind": "cxl"})
  host = here().model_copy(update={"tiers": (tier, card)})
  half = 0.6 * available.limit_bytes()
  occupied = {i: {"dram": half, "cxl0": half} for i in INSTANTS}
  with pytest.raises(ValueError, match="memory: the placement needs"):
    preflight.check(host, occupied, 0.0)


def test_bytes_that_are_not_free_are_a_warning(tmp_path):
  total, free = available.limit_bytes(), available.available_bytes()
  assert 0 < free < total
  assert preflight.check(here(), held(0.1 * free), 0.0) == []
  (warning,) = preflight.check(here(), held(total), 0.0)
  assert warning.endswith("GB are free at the moment")
  assert f"needs {total / 1e9:.1f} GB" in warning
  disk = shutil.disk_usage(tmp_path)
  (warning,) = preflight.check(
    here(tmp_path / "tier"), held(disk.total), 0.0
  )
  assert warning.startswith(f"{tmp_path}/tier: disk: the placement needs")


def test_the_larger_instant_counts():
  first, second = INSTANTS
  free = available.available_bytes()
  occupied = {first: {"dram": 0.0}, second: {"dram": 1.01 * free}}
  assert len(preflight.check(here(), occupied, 0.0)) == 1


def test_locked_bytes_and_missing_nodes_are_named(monkeypatch):
  monkeypatch.setattr(preflight, "_lockable", lambda: 64e6)
  assert preflight.check(here(), held(0.0), 64e6) == []
  (warning,) = preflight.check(here(), held(0.0), 2.5e9)
  assert warning.startswith(
    "2.5 GB are locked for copies, and this process may lock 64.0 MB: raise"
  )
  (tier,) = here().tiers
  host = here().model_copy(update={
    "tiers": (tier.model_copy(update={"node": 4096}),)
  })
  with pytest.raises(ValueError, match="tier 'dram': node=4096 does not exis"):
    preflight.check(host, held(0.0), 0.0)
