"""Benchmark of kernels: memory of operands, counted bytes and times."""

import dataclasses
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.benchmarks.programs import kernels
from caatnet.benchmarks.programs.kernel_subjects import SUBJECTS
from configs.benchmark import kernels as config_of
from parallel.kernels.gather_rows import order
from parallel.ledger import fingerprint, targets
from parallel.plans.hardware import devices
from tests import users
from tests.caatnet.benchmarks.printed import rows_of


def test_gather_of_rows_is_checked_and_its_bytes_are_counted(capsys):
  config = config_of.get_config()
  config.benchmark.ops = ("gather_rows",)
  rows = json.loads(json.dumps(kernels.run(config)))["rows"]
  assert {row["implementation"] for row in rows} == {"tpu_interpret"}
  assert {row["relative_error"] for row in rows} == {0}
  # Only compiled kernels have a memory of interest.
  assert not any("temporary_bytes" in row for row in rows)
  subject = SUBJECTS["gather_rows"](False)[0]
  assert kernels._compare_to_reference(subject, "reference", True)[
    "temporary_bytes"
  ] >= 0
  bytes_of = {row["case"]: row["bytes"] for row in rows}
  # 17 rows of 32 features are read and written, and 17 ids are read.
  assert bytes_of["a line"] == 17 * 32 * 4 * 2 + 17 * 4
  assert "gather_rows, a line" in capsys.readouterr().out


@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_table_has_the_memory_kind_and_order_of_its_kernel(kernel):
  for subject in SUBJECTS["gather_rows"](False):
    (device,) = jax.devices()[:1]
    table, ids = subject.draw(0)
    for name, place in (
      (kernel, "pinned_host"), (f"{kernel}_interpret", "device"),
      ("reference", "device"),
    ):
      operands = subject.operands(0, name)
      shapes = subject.shapes(name, device)
      for x, shape in zip(operands, shapes, strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        assert x.sharding.memory_kind == shape.sharding.memory_kind
      assert operands[0].sharding.memory_kind == place
      kind = name.removesuffix("_interpret")
      np.testing.assert_array_equal(
        operands[0], order.lay_out_table(np.asarray(table), kind)
      )
      # Bytes across the link, out of the whole table.
      per_id = 4 * table.shape[1] * order.read_amplification(
        table.shape[1], kind
      )
      expected = {} if kind == "reference" else {
        operands[0].shape: per_id * len(ids)
      }
      assert subject.reads(name) == expected
    found = subject.run(
      *subject.operands(0, f"{kernel}_interpret"),
      implementation=f"{kernel}_interpret",
    )
    np.testing.assert_array_equal(found, table[ids])


def test_gpu_program_reads_the_table_in_pinned_memory():
  """Lowers for CUDA: the kernel's operand is the pinned argument."""
  subject = SUBJECTS["gather_rows"](False)[0]
  (device,) = jax.devices()[:1]
  program = jax.jit(lambda *x: subject.run(*x, implementation="gpu"))
  text = program.trace(*subject.shapes("gpu", device)).lower(
    lowering_platforms=("cuda",)
  ).as_text()
  argument = text.index('%arg0: tensor<1280xf32> {mhlo.memory_kind = "pinned')
  call = text.index("__gpu$xla.gpu.triton")
  assert argument < call
  assert "%arg0)" in text[call : call + 60]


def test_kernel_is_timed_against_its_reference_and_a_copy(monkeypatch):
  """Executes the timed path of accelerators in the interpreter."""
  monkeypatch.setattr(kernels, "_COPY_BYTES", 1 << 12)
  monkeypatch.setattr(kernels, "_TIMED_BYTES", 1 << 20)
  options = config_of.get_config().benchmark
  options.rounds, options.buffers = 2, 1
  for op in ("reduce_add_norm", "nesterov"):
    subject = SUBJECTS[op](False)[0]
    found = kernels._measure(subject, "reference", options)
    assert found["min_s"] <= found["median_s"] <= found["max_s"]
    # The share of the copy's rate is bytes per second.
    rate = found["of_copy_bandwidth"] * found["copy_bytes_per_s"]
    assert rate * found["median_s"] == pytest.approx(subject.num_bytes)
    assert found["of_fused"] > 0
    assert found["of_unfused"] > 0


def test_rates_and_ratios_are_those_of_medians(monkeypatch):
  """A copy reads and writes its array."""
  monkeypatch.setattr(kernels, "_COPY_BYTES", 600)
  found = kernels._times_and_ratios(240, {
    "kernel": [2.0, 3.0, 40.0], "fused": [6.0, 6.0, 1.0],
    "unfused": [12.0, 1.0, 13.0], "copy": [4.0, 9.0, 1.0],
  })
  assert found == {
    "median_s": 3, "min_s": 2, "max_s": 40, "copy_bytes_per_s": 300,
    "of_copy_bandwidth": 240 / 3 / 300, "of_fused": 0.5, "of_unfused": 0.25,
  }


def test_timed_program_executes_every_call():
  """Two sets of equal values before the loop, and in each iteration."""
  x = np.ones((64, 64), "f4")
  program = jax.jit(functools.partial(kernels._passes, jnp.sin, 3))
  text = users.compiled(program.lower([(x,), (x,)])).as_text()
  assert text.count(" sine(") == 4
  assert text.count(" while(") == 1


def test_bytes_of_a_target_are_counted_with_and_without_kernel(
  capsys, monkeypatch
):
  """A CPU with the rates of a TPU, and interpreted kernels, are everywhere."""
  config = config_of.get_config()
  options = config.benchmark
  make = SUBJECTS["add_norm"]
  subject = make(True)[0]  # the others take longer
  monkeypatch.setitem(SUBJECTS, "add_norm", lambda large: make(large)[:1])
  options.ops, options.target = ("add_norm",), "cpu:1"
  with pytest.raises(ValueError, match="target='cpu:1' must be a TPU or GPU"):
    kernels.run(config)
  target = dataclasses.replace(
    targets.resolve("cpu:1"), hardware=devices.TPU_V5E
  )
  options.target = "tpu_interpret:1"
  found = kernels._count_for_target(options, target)
  assert found["target"] == options.target
  printed = [
    [cell.strip() for cell in line.split("│")[1:-1]]
    for line in capsys.readouterr().out.splitlines() if line.startswith("│")
  ]
  (row,) = found["rows"]
  kernel, xla = row["kernel_bytes"], row["xla_bytes"]
  assert (row["op"], row["case"]) == (subject.op, subject.case)
  assert row["implementation"] == "tpu_interpret"
  assert kernel > xla >= row["least_bytes"] == subject.num_bytes
  assert row["fingerprint"] == fingerprint.fingerprint(
    kernels._lowered(subject, "tpu_interpret", target)
  )
  assert printed[-1] == [
    f"{row['op']}, {row['case']}",
    *(f"{x / 1e6:,.1f}" for x in (subject.num_bytes, kernel, xla)),
    f"{xla / kernel:.2f}",
    *(f"{row[f'{k}_temporary_bytes'] / 1e6:,.1f}" for k in ("kernel", "xla")),
  ]


def test_table_of_timed_kernels_has_times_shares_and_refusals(capsys):
  row = {
    "op": "mean", "case": "a row", "implementation": "gpu", "bytes": 1.5e6,
    "relative_error": 0.00123, "refused": {"tpu": "no TPU"},
    "temporary_bytes": 2500, "median_s": 12e-6, "of_copy_bandwidth": 0.75,
    "of_fused": 0.5, "of_unfused": 0.25,
  }
  kernels._print([row], True)
  printed = capsys.readouterr().out
  cells = [
    "mean, a row", "gpu", "1.500", "1.2e-03", "0.003", "12", "75%", "0.50",
    "0.25",
  ]
  assert rows_of(printed) == [cells]
  assert "mean, a row: no tpu kernel: no TPU" in printed
  kernels._print([row], False)
  printed = capsys.readouterr().out
  assert rows_of(printed) == [cells[:4]]
  assert "interpreted: no times" in printed


def test_operands_are_read_once_per_timed_call():
  """A call of each set of operands; a program of several passes over them."""
  x = np.ones(8, "f4")
  for times in (1, 3):
    calls = []

    def counted(x, calls=calls):
      calls.append(x.shape)
      return x + 1

    timer = kernels._timer(counted, [(x,), (2 * x,)], times)
    start = time.perf_counter()
    assert 0 < timer() <= (time.perf_counter() - start) / (2 * times)
    # Traced once for both sets, or for each set before and in the loop.
    assert len(calls) == 1 if times == 1 else len(calls) >= 4
