"""Benchmark of paged attention: rows and table of a target to lower for."""

import types

import pytest

from caatnet.benchmarks.programs import paged_attention
from configs.benchmark import paged_attention as config_of
from parallel.kernels.paged_attention import api


def test_each_case_of_a_target_is_lowered_or_has_a_reason(capsys):
  config = config_of.get_config()
  config.benchmark.update({
    "targets": ("gpu:h200:1x1",), "head_widths": (64,), "kv_heads": (2,),
  })
  found = paged_attention.run(config)
  rows = found["rows"]
  assert [(row["kernel"], row["kind"]) for row in rows] == [
    (kernel, kind) for kernel in api.KERNELS["gpu"]
    for kind in paged_attention._KINDS
  ]
  assert any(row["takes"] for row in rows)
  for row in rows:
    assert (row["target"], row["head_width"], row["kv_heads"]) == (
      "gpu:h200:1x1", 64, 2
    )
    assert row["takes"] == (row["why"] == "")
    assert row["by"] in ("lowered", "compiled", "refused", "failed")
  # Without the plugin, programs are only lowered.
  lowered = {row["by"] for row in rows if row["takes"]} == {"lowered"}
  assert lowered == bool(found["missing"]) == (not found["versions"])
  printed = capsys.readouterr().out
  assert "attention over pages, lowered for gpu" in printed or not lowered
  for row in rows:
    assert row["why"].split("\n")[0][:40] in printed


def test_cells_are_copies_or_numbers_of_reasons(capsys):
  common = {"kernel": "x", "head_width": 64, "kv_heads": 2, "takes": True}
  refused = common | {"takes": False, "why": "no such width"}
  target = paged_attention._Target("gpu", [], "compiled for gpu")
  paged_attention._print(target, [
    common | {"temporary_bytes": 51, "page_bytes": 100},
    common | {"temporary_bytes": 50, "page_bytes": 100}, refused,
    refused | {"why": "another"}, refused,
  ])
  lines = capsys.readouterr().out.splitlines()
  (row,) = (line for line in lines if line.startswith("│"))
  assert [cell.strip() for cell in row.strip("│").split("│")] == [
    "x", "64", "2", "copies", "yes", "no [1]", "no [2]", "no [1]"
  ]
  assert "[1] no such width" in lines
  assert "[2] another" in lines


def test_target_without_kernels_is_named():
  with pytest.raises(ValueError, match="'cpu:8' must be a TPU or GPU"):
    paged_attention._resolve("cpu:8")


def test_cases_have_whole_groups_of_heads():
  """Up to eight heads, or as many as keys and values have."""
  options = types.SimpleNamespace(
    head_widths=(64, 128), kv_heads=(1, 2, 3, 8, 16)
  )
  found = list(paged_attention._cases(options, "gpu"))
  assert len(found) == (
    len(api.KERNELS["gpu"]) * 2 * 5 * len(paged_attention._KINDS)
  )
  heads = {case.kv_heads: case.heads for _, _, case in found}
  assert heads == {1: 8, 2: 8, 3: 6, 8: 8, 16: 16}
  assert {case.width for _, _, case in found} == {64, 128}
  for _, kind, case in found:
    assert (case.window > 0) == (kind == "window")
    assert (case.rows > 1) == (kind == "chunk")
    assert (case.stored == "int8") == (kind == "int8 pages")
