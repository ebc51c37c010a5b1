"""Memory accesses of compiled GPU kernels: width, order and register spills.

A streaming kernel is fast if its reads are wide, are issued early, and are
many at a time. Without a GPU, these properties follow from the kernel's PTX
and from the register allocation that ptxas reports.
"""

import pathlib
import re
import subprocess

import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

import nvidia.cuda_nvcc

from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.codec import cases as codec_cases
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from tests.parallel.kernels.ahead_of_time import (
  lowered_add_norm,
  lowered_codec,
  lowered_reduce_add_norm,
)

TARGET = "gpu:h200:1x1"
PTXAS = pathlib.Path(*nvidia.cuda_nvcc.__path__) / "bin" / "ptxas"

ROWS = (
  *(
    (lowered_add_norm, "add_norm", case)
    for case in add_norm_cases.LARGE.values()
  ),
  *(
    (lowered_reduce_add_norm, "reduce_add_norm", case)
    for case in reduce_cases.LARGE.values()
  ),
)


@pytest.fixture
def compiled(tmp_path):
  """Function from a lowered program to {kernel: (accesses, bytes spilled)}."""

  def compile_(lowered):
    lowered.compile({
      "xla_dump_to": str(tmp_path),
      "xla_backend_optimization_level": 3,  # 0 in other tests
      "xla_llvm_disable_expensive_passes": False,
    })
    return dict(
      kernel
      for path in tmp_path.glob("*.ptx") if path.stat().st_size
      for kernel in _kernels(path)
    )

  return compile_


def _kernels(path):
  said = subprocess.run(
    [PTXAS, "-v", "-arch=sm_90a", path, "-o", "/dev/null"],
    check=True, capture_output=True, text=True,
  ).stderr
  for body in path.read_text().split(".visible .entry ")[1:]:
    name = body.split("(")[0]
    about = said.split(f"'{name}'")[1]
    spilled = re.search(r"(\d+) bytes spill stores", about)[1]
    # In program order: ("ld", 16) is a read of 16 bytes per thread.
    accesses = [
      (what, int(count or 1) * int(bits) // 8)
      for what, count, bits in re.findall(
        r"(ld|st)\.global(?:\.v(\d))?\.b(\d+)", body
      )
    ]
    yield name, (accesses, int(spilled))


@pytest.mark.parametrize(("lower", "name", "case"), ROWS, ids=str)
def test_all_reads_of_a_row_precede_its_writes(lower, name, case, compiled):
  """Reads 16-byte words; int8 blocks and quarter rows use half that width."""
  accesses, spilled = compiled(lower(case, TARGET, "gpu"))[name]
  first_write = accesses.index(("st", accesses[-1][1]))
  assert all(what == "st" for what, _ in accesses[first_write:])
  scales = getattr(case, "block", None)
  narrow = {4, 8} if scales else {8} if case.private > case.shared else set()
  assert {size for _, size in accesses} - {16} == narrow
  assert spilled == 0


@pytest.mark.parametrize("name", add_norm_cases.LARGE)
def test_next_row_is_prefetched_during_computation(name, compiled):
  """Reads, including those of the next row, precede the iteration's writes."""
  case = add_norm_cases.LARGE[name]
  if case.shared + case.private > 8192:
    pytest.skip("two rows of this size do not fit the registers")
  accesses, spilled = compiled(lowered_add_norm(case, TARGET, "gpu"))[
    "add_norm_backward"
  ]
  kinds = [what for what, _ in accesses]
  assert "ld" not in kinds[kinds.index("st"):]
  assert {size for _, size in accesses} == {16}
  assert spilled <= 16  # of 512 bytes of registers per thread


def test_backward_of_a_long_row_does_not_spill(compiled):
  case = add_norm_cases.LARGE["width 12288, p=.25"]
  kernels = compiled(lowered_add_norm(case, TARGET, "gpu"))
  _, spilled = kernels["add_norm_backward"]
  assert spilled == 0


@pytest.mark.parametrize("op", ["plain", "delta", "fed", "mean", "nesterov"])
@pytest.mark.parametrize("name", ["int8", "int4", "8192 x 8192"])
def test_codecs_read_vectors_in_wide_words(name, op, compiled):
  case = codec_cases.LARGE[name]
  kernels = compiled(lowered_codec(op, case, TARGET, "gpu"))
  name = f"codec_{op}" if op in ("mean", "nesterov") else "codec_encode"
  accesses, spilled = kernels[name]
  reads = [size for what, size in accesses if what == "ld"]
  # Per sender a scale and its weight, and the factor of the mean.
  assert sum(size == 4 for size in reads) <= 2 * case.senders + 1
  codes = 16 if case.codec.bits == 8 else 8
  assert {size for size in reads if size > 4} <= {16, codes}
  assert spilled == 0
