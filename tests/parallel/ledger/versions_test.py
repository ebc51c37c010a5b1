"""Texts of one program by several versions of jax give the same ledger."""

import pathlib

import jax
from jax.sharding import AbstractMesh
import pytest

from parallel.ledger.reading import read
from parallel.ledger.sends import report
from tests.parallel.ledger import versions_program as program

FOLDER = pathlib.Path(__file__).parent / "versions"
VERSIONS = ("0.10.2", "0.12.0.1")
MESH = AbstractMesh(tuple(program.SIZES.values()), tuple(program.SIZES))
# Elements of a device's rows, and of those scattered over "model".
WHOLE = program.ROWS // 2 * program.WIDTH
PART = WHOLE // 4
# (kind, axes) -> elements that the program itself sends in a layer.
EXPLICIT = {
  ("all_reduce", "model"): WHOLE,
  ("reduce_scatter", "model"): WHOLE,
  ("all_to_all", "model"): 2 * PART,
  ("all_gather", "model"): PART,
  ("permute", "data"): WHOLE,
}


def sums(found):
  """Returns (kind, axis) -> bytes of a run."""
  table = {}
  for e in found.entries:
    (axis,) = e.axes
    table[e.kind, axis] = table.get((e.kind, axis), 0) + e.count * e.bytes
  return table


def elements(extra=()):
  """Returns (kind, axis) -> elements of a run, with further ones."""
  sent = {key: program.LAYERS * size for key, size in EXPLICIT.items()}
  for key, size in extra:
    sent[key] += size
  return sent


@pytest.mark.quick
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_lowered_text(version, partitioner):
  path = FOLDER / f"{version}-{partitioner}.stablehlo.txt"
  expected = {key: 2 * n for key, n in elements().items()}  # bfloat16
  found = read(path, mesh=MESH)
  assert sums(found) == expected
  assert {e.entry.dtype for e in found.executed} == {"bfloat16"}
  if partitioner == "shardy":  # it names the mesh
    named = read(path)
    assert dict(named.axes) == program.SIZES
    assert named.entries == found.entries
  else:  # axes are inferred
    unnamed = read(path)
    assert [(e.kind, e.count, e.bytes) for e in unnamed.entries] == [
      (e.kind, e.count, e.bytes) for e in found.entries
    ]
    assert any("SIZE@STRIDE" in note for note in unnamed.notes)


@pytest.mark.quick
@pytest.mark.parametrize("version", VERSIONS)
def test_compiled_text(version):
  found = read(FOLDER / f"{version}-shardy.hlo.txt", mesh=MESH)
  # The sum of the product, once; CPUs send float32.
  product = ("all_reduce", "model"), WHOLE
  assert sums(found) == {k: 4 * n for k, n in elements([product]).items()}
  lines = pathlib.Path(program.__file__).read_text().splitlines()
  named = [e.source.rpartition(":") for e in found.executed]
  assert {pathlib.Path(file).name for file, _, _ in named} == {
    pathlib.Path(program.__file__).name
  }
  (line,) = {
    lines[int(number) - 1] for e, (_, _, number) in zip(
      found.executed, named, strict=True
    ) if e.entry.count == 1
  }
  assert line.endswith("# product")
  # Newer versions mark the sum that the partitioner has made.
  marked = [e.entry.count for e in found.executed if e.inserted]
  assert marked == ([1] if version.startswith("0.12") else [])
  rows = report.readings_as_data({"it": found})["it"]["collectives"]
  assert [r["executions"] for r in rows if r["inserted"]] == marked


@pytest.mark.quick
def test_program_of_this_version_gives_the_same():
  f, arguments = program.step()
  found = read(f, *arguments)
  texts = [
    read(FOLDER / f"{version}-shardy.hlo.txt", mesh=MESH)
    for version in VERSIONS
  ]
  assert dict(found.axes) == program.SIZES
  assert {e.requested for e in found.executed} == {"bfloat16"}
  assert all(sums(found) == sums(text) for text in texts)
  stable = f.lower(*arguments).as_text(debug_info=True)
  assert sums(read(stable)) == {k: 2 * n for k, n in elements().items()}
  assert jax.device_count() >= 8
