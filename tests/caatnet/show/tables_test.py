"""Tables of runs, compared with the numbers of these runs."""

import numpy as np

from caatnet.data.protocol import Dataset
from caatnet.data.text import TextData, measured
from caatnet.show import tables
from caatnet.show.report import size_text
from caatnet.train.evaluate import Evaluation

DATA = TextData(seq_len=4, batch_size=8, validation_windows=16)


def row(point, seed, loss, **fields):
  return {"point": point, "seed": seed, "validation_loss": loss,
          "forward_bytes": 2e6, "backward_bytes": 4e6, "worker_bytes": 5e3,
          **fields}


def test_points_are_compared_seed_by_seed(capsys):
  """Differences per seed cancel the effect of seeds; points may lack seeds."""
  tables.print_sweep([
    row("a", 1, 2.0), row("a", 2, 3.0), row("b", 2, 3.25), row("b", 1, 2.125),
    row("c", 7, 1.0),
  ])
  lines = capsys.readouterr().out.splitlines()
  a, b, c = (
    next(x for x in lines if f" {name} " in x) for name in ("a", "b", "c")
  )
  assert "+0.0000" in a
  for text in ("2.6875", "2.125 to 3.250", "+0.1875", "+0.125 to +0.250",
               "2.00", "4.00", "5.0"):
    assert text in b, text
  assert "+" not in c  # no seed in common


def test_evaluation_is_shown_as_data_and_as_tables(capsys):
  evaluation = Evaluation(
    {"loss": 2.0}, {"loss": np.array([4.0, 2.0, 1.0, 1.0])}, 5
  )
  dataset = Dataset(
    "text", "f" * 64, None, None, measured,
    lambda: {"unigram": measured({"loss": 3.0})},
  )
  found = tables.evaluation_dict(evaluation, DATA, dataset, 7)
  assert found == {
    "step": 7, "validation_loss": 2.0,
    "validation_bits_per_byte": 2.0 / np.log(2), "num_examples": 5,
    "num_tokens": 20, "data_sha256": "f" * 64,
    "loss_per_place": [4.0, 2.0, 1.0, 1.0],
  }
  tables.print_evaluation(evaluation, DATA, dataset, 7)
  printed = capsys.readouterr().out
  for text in ("validation, 20 tokens", "step 7", "2.0000", "2.8854",
               "unigram", "3.0000", "4.3281", "1 to 4"):
    assert text in printed, text


def test_bytes_of_one_phase_and_sizes_are_formatted():
  rows = [
    {"axis": "tensor", "phase": "forward", "dtype": "float32", "bytes": 2e6},
    {"axis": "tensor", "phase": "backward", "dtype": "float32", "bytes": 8e6},
    {"axis": "data", "phase": "forward", "dtype": "float32", "bytes": 9e6},
  ]
  assert tables.communication_text(rows, "forward") == "2.00 MB float32"
  assert tables.communication_text(rows, "update") == "0"
  assert [size_text(x) for x in (512, 65536, 3 * 2**20, 2**31)] == [
    "512 B", "64 KiB", "3 MiB", "2 GiB"
  ]
