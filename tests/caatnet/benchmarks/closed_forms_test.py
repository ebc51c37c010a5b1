"""Closed forms of other projects' programs: their recorded and read bytes."""

import json
import pathlib

import jax
import pytest

from caatnet.benchmarks.foreign import foreign_programs, planted, with_flax
from caatnet.benchmarks.foreign.closed_forms import PROGRAMS
from parallel.xla import reading

RECORDED = pathlib.Path(__file__).parents[3] / "results/foreign_programs.json"


def test_closed_forms_are_those_of_the_recorded_programs():
  """Covers all projects, most of which are not in this environment."""
  rows = json.loads(RECORDED.read_text())["rows"]
  recorded = {(row["project"], row["program"]): row["read"] for row in rows}
  assert recorded == {
    (project, name): {" ".join(key): size for key, size in sends.items()}
    for project, programs in PROGRAMS.items()
    for name, sends in programs.items()
  }


def test_all_faults_were_named():
  rows = json.loads(RECORDED.read_text())["faults"]
  assert all(row["found"] for row in rows)
  assert {(r["project"], r["program"], r["fault"]) for r in rows} == {
    (*program, kind)
    for program, faults in planted.FAULTS.items() for kind in faults
  }
  assert planted.FAULTS.keys() == {
    (project, name) for project, programs in PROGRAMS.items()
    for name in programs
  }


@pytest.mark.parametrize("name", ["batch_norm", "attention", "nnx_mlp"])
def test_layers_of_flax_send_what_the_closed_form_says(name):
  with jax.numpy_rank_promotion("allow"):
    jitted, arguments = getattr(with_flax, name)()
    found = reading.read(jitted, *arguments)
  row = foreign_programs.compared(found, PROGRAMS["flax"][name])
  assert row["equal"], row
