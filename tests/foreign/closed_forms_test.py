"""Closed forms of other projects' programs: their recorded and read bytes."""

import importlib.util
import json
import pathlib
import re
import sys
import types

import jax
import pytest

from parallel.ledger import reading
from tests.foreign import planted, programs
from tests.foreign.closed_forms import PROGRAMS

RESULTS = pathlib.Path(__file__).parents[2] / "results"


def _recorded(key):
  return [
    row for name in ("programs", "frameworks")
    for row in json.loads((RESULTS / f"foreign_{name}.json").read_text())[key]
  ]


def test_closed_forms_are_those_of_the_recorded_programs():
  """Covers all projects, most of which are not in this environment."""
  rows = _recorded("rows")
  recorded = {(row["project"], row["program"]): row["read"] for row in rows}
  assert recorded == {
    (project, name): {" ".join(key): size for key, size in sent.items()}
    for project, sends in PROGRAMS.items()
    for name, sent in sends.items()
  }
  for row in rows:  # with the versions that are required
    packages = programs._module(row["project"]).PACKAGES
    required = dict(p.split("==") for p in packages if "==" in p)
    assert required.items() <= row["versions"].items()
    assert required.keys() | {"jax"} == row["versions"].keys() or not required


def test_faults_were_named_but_for_these():
  rows = _recorded("faults")
  missed = {
    (r["project"], r["program"], r["fault"]) for r in rows if not r["found"]
  }
  assert missed == {
    ("flax", "attention", "dtype"),  # another line is named, too
    ("keras", "data_parallel", "gather"),  # of an argument: another line
    ("keras", "model_parallel", "gather"),
    ("levanter", "llama", "dtype"),  # as in flax
    ("levanter", "llama", "gather"),
    ("levanter", "llama", "remat"),
    ("maxtext", "llama", "dtype"),  # as in flax
    ("maxtext", "mixtral", "dtype"),
  }
  assert {(r["project"], r["program"], r["fault"]) for r in rows} == {
    (*program, kind)
    for program, faults in planted.FAULTS.items() for kind in faults
  }
  assert planted.FAULTS.keys() == {
    (project, name) for project, sends in PROGRAMS.items()
    for name in sends
  }


def _shapes(function):
  """Returns the shapes of arguments that the text of a program names."""
  names = vars(sys.modules[function.__module__]) | {"devices": 8}
  texts = re.findall(r"``\[(.*?)\]``", function.__doc__)
  assert texts
  return {eval(f"({text},)", names) for text in texts}


@pytest.mark.filterwarnings("default")  # of other projects
@pytest.mark.parametrize(("project", "name"), [
  (project, name) for project, sends in PROGRAMS.items()
  for name in sends if (project, name) != ("flax", "sharded")
])
def test_programs_send_what_the_closed_form_says(project, name, monkeypatch):
  """Projects whose packages are missing are skipped; Flax is installed."""
  module = programs._module(project)
  if programs._pinned(module.PACKAGES):
    pytest.skip("needs other versions")
  for package in module.PACKAGES:
    if not importlib.util.find_spec(package):
      pytest.skip(f"{package} is not installed")
  # As in a script of the folder, which imports its neighbours.
  monkeypatch.syspath_prepend(pathlib.Path(module.__file__).parent)
  with jax.numpy_rank_promotion("allow"):
    jitted, arguments = getattr(module, name)()
    shapes = {getattr(x, "shape", ()) for x in jax.tree.leaves(arguments)}
    assert _shapes(getattr(module, name)) <= shapes
    lowered = jitted.lower(*arguments)
    lowered = getattr(lowered, "lowered", lowered)
    found = reading.read(lowered)
  (used,) = re.findall(r"@main\((.*?)\) ->", lowered.as_text(), re.DOTALL)
  arrays = [x for x in jax.tree.leaves(arguments) if hasattr(x, "shape")]
  # Some have fields that the program does not read.
  unused = {"statistics": 1, "sharded_edges": 3}.get(name, 0)
  assert len(re.findall(r"%arg\d+:", used)) == len(arrays) - unused
  row = programs.compared(found, PROGRAMS[project][name])
  assert row["equal"], row
  assert not row["unknown"]
  if project == "keras":  # as `fit` donates the state
    donated = [
      {x.donated for x in jax.tree.leaves(argument)}
      for argument in lowered.args_info[0]
    ]
    assert donated == [{True}, {False}]


def test_ring_attention_gets_a_part_of_the_sequence(monkeypatch):
  """Its package needs another jax; a stand-in receives its operands."""
  received = []

  def attend(q, k, v, bias, segments, _, axis_name, **options):
    received.append([x.shape for x in (q, k, v, bias, segments)])
    for name in ("query_chunk_size", "key_chunk_size"):  # whole chunks
      assert q.shape[1] % options["blockwise_kwargs"][name] == 0
    return q + jax.lax.ppermute(k + v, axis_name, [(0, 1)])

  stand_in = types.ModuleType("ringattention")
  stand_in.ringattention = attend
  monkeypatch.setitem(sys.modules, "ringattention", stand_in)
  p = programs._module("ringattention")
  jitted, arguments = p.causal()
  whole = p.BATCH, 8 * p.LENGTH, p.HEADS, p.WIDTH
  assert [x.shape for x in jax.tree.leaves(arguments)] == [
    *[whole] * 3, (p.BATCH, 1, 1, 8 * p.LENGTH), (p.BATCH, 8 * p.LENGTH),
  ]
  assert _shapes(p.causal) == {whole}
  for x in arguments[0]:  # the mesh that the text of the program does not name
    assert dict(x.sharding.mesh.shape) == p.MESH
  lowered = jitted.lower(*arguments)
  part = p.BATCH, p.LENGTH, p.HEADS, p.WIDTH
  assert received == [[*[part] * 3, *(
    x.shape for x in arguments[1:]
  )]]
  # The gradient of each of the operands that are cut.
  assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [whole] * 3
