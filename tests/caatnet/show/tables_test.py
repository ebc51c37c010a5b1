"""Tables of runs, compared with the numbers of these runs."""

import numpy as np
import pytest

from caatnet.data.protocol import Dataset
from caatnet.data.text import TextData, text_measures
from caatnet.show import render, tables
from caatnet.train.evaluate import Evaluation
from tests.caatnet.show import terminal

DATA = TextData(seq_len=4, batch_size=8, validation_windows=16)


def row(point, seed, loss, **fields):
  return {"point": point, "seed": seed, "validation_loss": loss,
          "forward_bytes": 2e6, "backward_bytes": 4e6, "worker_bytes": 5e3,
          **fields}


def test_points_are_compared_seed_by_seed(capsys):
  """Differences per seed cancel the effect of seeds; points may lack seeds."""
  rows = [
    row("", 1, 2.0), row("", 2, 3.0), row("b", 2, 3.25), row("b", 1, 2.125),
    row("c", 7, 1.0, forward_bytes=2.5e6, worker_bytes=None),
  ]
  render.show(tables.sweep_table(rows))
  ((title, (headings, *printed)),) = terminal.tables(
    capsys.readouterr().out
  ).items()
  assert title.endswith("MB of the tensor axis, kB of the worker axis")
  assert [dict(zip(headings, cells, strict=True)) for cells in printed] == [
    {"point": "base", "seeds": "2", "mean": "2.5000",
     "range": "2.000 to 3.000", "diff": "+0.0000",
     "range of diff": "+0.000 to +0.000", "forward MB": "2.00",
     "backward MB": "4.00", "worker kB": "5.0"},
    {"point": "b", "seeds": "2", "mean": "2.6875",
     "range": "2.125 to 3.250", "diff": "+0.1875",
     "range of diff": "+0.125 to +0.250", "forward MB": "2.00",
     "backward MB": "4.00", "worker kB": "5.0"},
    # No seed in common with the first point.
    {"point": "c", "seeds": "1", "mean": "1.0000",
     "range": "1.000 to 1.000", "diff": "", "range of diff": "",
     "forward MB": "2.50", "backward MB": "4.00", "worker kB": "0.0"},
  ]


def test_evaluation_is_shown_as_data_and_as_tables(capsys):
  evaluation = Evaluation(
    {"loss": 2.0}, {"loss": np.array([4.0, 2.0, 1.0, 1.0])},
    {"loss": np.full(4, 5)}, 5
  )
  dataset = Dataset(
    "text", "f" * 64, None, None, text_measures,
    lambda: {"unigram": text_measures({"loss": 3.0})},
  )
  found = tables.evaluation_dict(evaluation, DATA, dataset, 7)
  assert found == {
    "step": 7, "validation_loss": 2.0,
    "validation_bits_per_byte": 2.0 / np.log(2), "num_examples": 5,
    "num_tokens": 20, "data_sha256": "f" * 64,
    "loss_per_place": [4.0, 2.0, 1.0, 1.0],
  }
  tables.print_evaluation(evaluation, DATA, dataset, 7)
  assert terminal.tables(capsys.readouterr().out) == {
    "validation, 20 tokens": [
      ["model", "nats per byte", "bits per byte"],
      ["checkpoint of step 7", "2.0000", "2.8854"],
      ["unigram", "3.0000", "4.3281"],
    ],
    "loss by position": [
      ["tokens of context", "nats per byte"], ["1 to 4", "2.0000"]
    ],
  }


@pytest.mark.parametrize(("length", "ranges"), [
  (8, ["1 to 8"]), (9, ["1 to 8", "9 to 9"]),
  (40, ["1 to 8", "9 to 16", "17 to 32", "33 to 40"]),
])
def test_ranges_of_positions_double(capsys, length, ranges):
  losses = np.arange(1.0, length + 1)
  dataset = Dataset("text", "", None, None, text_measures, dict)
  tables.print_evaluation(
    Evaluation(
      {"loss": 2.0}, {"loss": losses}, {"loss": np.full(len(losses), 500)}, 500
    ), DATA, dataset, 7
  )
  found = terminal.tables(capsys.readouterr().out)
  assert list(found) == ["validation, 2,000 tokens", "loss by position"]
  ends = [[int(x) for x in text.split(" to ")] for text in ranges]
  assert found["loss by position"][1:] == [
    [text, f"{(a + b) / 2:.4f}"] for text, (a, b) in zip(
      ranges, ends, strict=True
    )
  ]


def test_evaluation_without_positions_has_one_table(capsys):
  dataset = Dataset("images", "", None, None, dict, dict)
  tables.print_evaluation(
    Evaluation(
      {"loss": 2.0}, {"loss": np.array(2.0)}, {"loss": np.array(5)}, 5
    ), DATA, dataset, 7
  )
  assert terminal.tables(capsys.readouterr().out) == {
    "validation, 20 tokens": [
      ["model", "nats per byte", "bits per byte"],
      ["checkpoint of step 7", "2.0000", "-"],  # a measure is absent
    ],
  }


def test_results_on_tasks_are_listed(capsys):
  found = {
    "step": 7, "context": 4096, "num_cut": 0, "metrics": [
      {"task": "sums", "version": 1, "num_documents": 1200, "num_shots": 3,
       "filter": "none", "metric": "acc", "value": 0.25, "stderr": 0.125},
      {"task": "text", "version": "2.0", "num_documents": 9, "num_shots": 0,
       "filter": "strict", "metric": "count", "value": 12, "stderr": None},
    ],
  }
  tables.print_tasks(found)
  expected = {
    "lm-evaluation-harness, checkpoint of step 7, context of 4,096 tokens": [
      ["task", "version", "documents", "shots", "filter", "metric", "value",
       "stderr"],
      ["sums", "1", "1,200", "3", "none", "acc", "0.2500", "0.1250"],
      ["text", "2.0", "9", "0", "strict", "count", "12", "-"],
    ],
  }
  assert terminal.tables(out := capsys.readouterr().out) == expected
  assert "truncated" not in out
  tables.print_tasks(found | {"num_cut": 1500})
  assert capsys.readouterr().out == (
    f"{out}requests whose context was truncated at its beginning: 1,500\n"
  )


def test_bytes_of_one_phase_and_sizes_are_formatted():
  rows = [
    {"axis": "tensor", "phase": "forward", "dtype": "float32", "bytes": 2e6},
    {"axis": "tensor", "phase": "backward", "dtype": "float32", "bytes": 8e6},
    {"axis": "data", "phase": "forward", "dtype": "float32", "bytes": 9e6},
  ]
  assert tables.communication_text(rows, "forward") == "2.00 MB float32"
  assert tables.communication_text(rows, "update") == "0"
  rows[2] |= {"axis": "tensor", "dtype": "bfloat16"}
  assert tables.communication_text(rows, "forward") == (
    "2.00 MB float32, 9.00 MB bfloat16"
  )
