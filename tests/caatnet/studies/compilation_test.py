"""A compiled step of a small model: what is said of it, and its tables."""

import collections

from caatnet.studies.compilation import partition, tables
from parallel.xla import ledger
from tests.caatnet.train import linear_model


def test_a_partition_s_formula_stands_beside_the_program(capsys):
  """With two microbatches and two lanes; losses and norms are the rest."""
  experiment = linear_model.make(
    data=4, devices=(1, 2), scheme="zero3", accumulation=2
  )
  program = experiment.program
  asked = ledger.collectives(
    experiment.lower_step(), program.layout.mesh
  )
  found = partition.analyse(program, 2, asked, asked)
  rows = collections.defaultdict(dict)
  for row in found["bytes"]:
    rows[row["kind"]] = row
    assert row["lowered"] == row["compiled"]
  # 6 elements are padded to 8 and 2 to 4; two lanes have shards of 2 and 1,
  # gathered forward and backward.
  gathers = rows["all_gather"]
  assert (gathers["axes"], gathers["dtype"]) == ("data", "float32")
  assert gathers["formula"] == gathers["lowered"] == 2 * 2 * 2 * (2 + 1) * 4
  scatters = rows["reduce_scatter"]
  assert scatters["formula"] == scatters["lowered"] == 2 * (8 + 4) * 4
  assert rows["all_reduce"]["formula"] == 0 < rows["all_reduce"]["lowered"]
  assert found["memory"]["state (arguments)"] == 2 * 12 * (2 + 1)
  tables._print_partition("it", found)
  printed = capsys.readouterr().out
  assert "reduce_scatter" in printed
