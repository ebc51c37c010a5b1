"""Subjects of the kernel benchmark: their stages and bytes are those of ops."""

import functools

import jax
import numpy as np
import pytest

from caatnet.benchmarks.programs.kernel_subjects import SUBJECTS


def _unfused(subject, *operands):
  results = ()
  for stage in subject.stages:
    results = stage(*results, *operands)
  return results


def _num_bytes(op, operands, results):
  """Bytes of the arrays that an op reads and writes."""
  if op == "gather_rows":  # a row is read for each that is written
    operands = (*operands[1:], *results)
  if op == "reduce_add_norm" and operands[2].dtype != "int8":
    operands = operands[:3] + operands[4:]  # sums without a code have no scales
  return sum(x.nbytes for x in (*operands, *results))


@pytest.mark.parametrize(("op", "subject"), [
  pytest.param(op, subject, id=f"{op}, {subject.case}")
  for op, make in SUBJECTS.items() if op != "add_norm_backward"
  for subject in make(False)[::3][:3]
])
def test_stages_compute_the_op_and_its_bytes_are_those_of_its_arrays(
  op, subject
):
  assert subject.op == op
  operands = subject.operands(3, "reference")
  run = jax.jit(functools.partial(subject.run, implementation="reference"))
  expected = jax.tree.leaves(run(*operands))
  found = jax.tree.leaves(
    jax.jit(functools.partial(_unfused, subject))(*operands)
  )
  # Without an update the op omits the stream, which `_norm` returns.
  for x, y in zip(found[-len(expected) :], expected, strict=True):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    np.testing.assert_allclose(
      np.asarray(x, np.float64), np.asarray(y, np.float64), 2e-2, 2e-2
    )
  assert subject.num_bytes == _num_bytes(op, operands, expected)


def test_no_result_of_a_backward_is_an_operand_or_another_result():
  """XLA would copy it; with an update of the stream, and without one."""
  subjects = {
    len(subject.operands(3, "reference")): subject
    for subject in SUBJECTS["add_norm_backward"](False)
  }
  assert {*subjects} == {6, 8}
  for subject in subjects.values():
    operands = subject.operands(3, "reference")
    run = jax.jit(functools.partial(subject.run, implementation="reference"))
    results = jax.tree.leaves(run(*operands))
    # Normalised rows and gradients of streams and gain; with an update also the
    # stream, and the gradient of its private part.
    assert len(results) == (4 if len(operands) == 6 else 7)
    arrays = [*operands, *results]
    for i, x in enumerate(arrays[len(operands):], len(operands)):
      assert not any(
        x.shape == other.shape and np.array_equal(x, other)
        for other in arrays[:i]
      )
