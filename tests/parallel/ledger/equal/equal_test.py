"""Layouts are compared with one device: rounding, bugs, and their lines."""

import inspect

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.base import available
from parallel.ledger.equal import check, interpret, programs, verdict
from tests.parallel.ledger.equal import faults, unseen, unseen2
from tests.parallel.ledger.equal.programs import (
  mesh_of,
  mlp,
  mlp_params,
  regression,
  spmd,
  squared,
)

FAULTS = faults.FAULTS | unseen.FAULTS | unseen2.FAULTS
OTHER = {
  "rounded_before_reduction": "rounding",  # to bfloat16, at another place
  "rescaled_in_every_round": "refused",  # microbatches depend on the stages
}


def compared(name, faulty):
  fault = FAULTS[name]
  with jax.numpy_dtype_promotion("standard"):  # as most programs
    (report,) = check.check(
      lambda layout: fault.build(layout, faulty), [dict(fault.layout)], steps=1
    )
  return report


def is_near(location, build):
  """Returns whether the line of a fault is in or between those of a location.

  Only lines within the program count, not those of its helpers.
  """
  lines, first = inspect.getsourcelines(inspect.unwrap(build))
  (fault,) = (first + i for i, x in enumerate(lines) if "# FAULT" in x)
  chains = (
    location.lines, *location.made, location.passed, location.python,
    location.used
  )
  numbers = [
    int(number) for chain in chains for name, _, number in
    (line.rpartition(":") for line in chain)
    if name == inspect.getsourcefile(inspect.unwrap(build))
    and first <= int(number) < first + len(lines)
  ]
  return bool(numbers) and min(numbers) <= fault <= max(numbers)


@pytest.mark.rotated(20)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_a_bug_and_its_twin_is_not(name):
  report = compared(name, True)
  expected = OTHER.get(name, "bug")
  assert report.verdict == expected, check.describe(report)
  assert report.location is None or report.location.lines
  twin = compared(name, False)
  expected = "refused" if expected == "refused" else "rounding"
  assert twin.verdict == expected, check.describe(twin)


LOCATED = (
  "gradients_not_reduced", "gain_gradient_local", "gathered_in_wrong_order",
  "scatter_divides_by_other_axis",  # in the backward of a custom_vjp
  "local_causal_mask",  # a Python number, two lines before its use
  "recurrence_restarts",  # a state that is right only later
  "overflow_skips_own_part",  # float64 does not overflow
  "slopes_of_first_heads",  # before a mask of -1e30
  "same_noise_on_every_device",  # with random keys
)


@pytest.mark.rotated(len(LOCATED))
@pytest.mark.parametrize("name", LOCATED)
def test_line_of_a_fault_is_in_the_report(name):
  report = compared(name, True)
  assert is_near(report.location, FAULTS[name].build), report.location
  assert report.location.lines[0] in check.describe(report)


def regress(layout, change=lambda params, grads, value: (params, value)):
  """Data-parallel regression whose results ``change`` replaces."""
  def step(params, batch):
    value, grads = jax.value_and_grad(
      lambda p: squared(mlp(p, batch[0]), batch[1]).mean()
    )(params)
    grads, value = lax.pmean((grads, value), "data")
    params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
    return change(params, grads, value)

  mesh = mesh_of(layout, "data")
  step = spmd(step, mesh, (P(), P("data")), P(), check_vma=False)
  return step, (mlp_params(), regression(32))


@pytest.mark.quick
def test_equal_program_passes_with_its_growth_and_bytes():
  check.assert_equal(regress, "data:4")
  (report,) = check.check(regress, [{"data": 4}], steps=2)
  assert report.verdict == "rounding"
  assert len(report.growth) == 2
  assert max(report.growth) < 1e-5
  size = sum(x.size * 4 for x in jax.tree.leaves(mlp_params()))
  assert report.sent_bytes == {"data": size + 4}  # gradients and loss


def test_copies_of_a_result_that_differ_are_a_bug():
  """The first device has the right value."""
  def built(layout):
    return regress(layout, lambda params, _, value: (
      params, value + 0.1 * lax.axis_index("data").astype("float32")
    ))

  (report,) = check.check(built, [{"data": 2}], steps=1)
  assert report.verdict == "bug"
  assert [x.verdict for x in report.results].count("bug") == 1
  assert "its copies differ by" in check.describe(report)


def test_bfloat16_sum_of_a_layout_is_a_bug_in_its_dtype_only():
  def rounded(layout):
    def change(params, grads, value):
      if layout:  # a sum in fewer bits, which one device does not compute
        params = jax.tree.map(
          lambda x: x.astype("bfloat16").astype("float32"), params
        )
      return params, value

    return regress(layout, change)

  with pytest.raises(AssertionError, match=r"data:4: bug in \[0\].*fewer bits"):
    check.assert_equal(rounded, "data:4")


@pytest.mark.parametrize(("change", "message"), [
  (lambda layout, p, v: (p, {"loss": v} if layout else v), "depends? on the"),
  (lambda layout, p, v: (p, jnp.full(1 + len(layout), v)), "2. instead of"),
  (lambda layout, p, v: (
    p, v + jax.random.normal(
      jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    )), "the number of the device into a random key"),
])
def test_programs_that_cannot_be_compared_are_refused(change, message):
  def built(layout):
    return regress(layout, lambda p, _, v: change(layout, p, v))

  with pytest.raises(ValueError, match=message):
    check.assert_equal(built, "data:2")


@pytest.mark.parametrize(("build", "message"), [
  (lambda layout: 1 / 0, "one device: the program must return .* ZeroDivision"),
  (lambda layout: (lambda x: x, (1,)), "must return .jitted function"),
  (lambda layout: (jax.jit(lambda x: x @ x), (np.ones(3)[None],)),
   "one device: the step cannot be compiled: TypeError: dot_general"),
  (lambda layout: (jax.jit(lambda k: k), (jax.random.key(0),)),
   "typed random keys are not compared"),
  (lambda layout: (jax.jit(jnp.fft.fft), (np.ones(4),)),
   "complex numbers are not compared"),
])
def test_other_programs_get_one_line(build, message):
  with pytest.raises(ValueError, match=message) as error:
    check.assert_equal(build, "data:2")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "data", "data:0", "a:2,a:2", "a:x"])
def test_malformed_layouts_are_refused(text):
  with pytest.raises(ValueError, match="layouts="):
    programs.parse_layouts(text)


def test_integers_and_nan_are_compared():
  def step(x):
    return x, {"count": jnp.arange(4), "nan": jnp.full(2, jnp.nan)}

  (report,) = check.check(
    lambda layout: (jax.jit(step), (np.ones(3, "float32"),)), [{"data": 2}],
    steps=2,
  )
  assert (report.verdict, report.growth) == ("rounding", [0, 0])
  assert "NaN also on one device in [1]['nan']" in check.describe(report)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_layout_that_is_not_finite_is_a_bug(bad):
  def built(layout):
    return jax.jit(
      lambda x: x.at[0].set(bad) if layout else x
    ), (np.ones(4, "float32"),)

  with pytest.raises(AssertionError, match=r"data:2: bug in result .inf of"):
    check.assert_equal(built, "data:2")


def test_rounding_that_decides_what_is_finite_is_refused():
  def step(x):
    return jnp.where(x == 1, x, jnp.inf)

  with pytest.raises(ValueError, match="result becomes NaN or infinite on one"):
    check.assert_equal(
      lambda layout: (jax.jit(step), (np.ones(4, "float32"),)), "data:2"
    )


def test_arguments_that_a_step_does_not_use_are_passed():
  def step(state, numbers):
    return {"x": state["x"] + 1, "unused": state["unused"], "none": None}

  state = {"x": np.ones(4), "unused": np.ones(2), "none": None}
  check.assert_equal(
    lambda layout: (jax.jit(step), (state, {"round": np.int32(1)})), "data:2"
  )


def test_program_that_is_too_large_is_shrunk_or_refused(monkeypatch):
  found = []

  def shrinking(layout, shrink):
    found.append(shrink)
    x = np.ones((256 // shrink, 256), "float32")
    return jax.jit(lambda x: (x, x.sum())), (x,)

  monkeypatch.setattr(available, "available_bytes", lambda: 500_000)
  check.assert_equal(shrinking, "data:2")
  assert found == [1, 2, 4, 4]
  with pytest.raises(ValueError, match=r"needs 0\.0 GB in float64 on"):
    check.assert_equal(lambda layout: shrinking(layout, 1), "data:2")


def loops(x, w):
  """Nested loops, a branch, a function with own derivatives, and remat."""
  def layer(x, w):
    x = jax.checkpoint(lambda x: jax.nn.silu(x @ w))(x)
    return lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: 2 * x, x), x[0]

  x, rows = lax.scan(layer, x, w)
  x = jax.vmap(lambda x: lax.while_loop(
    lambda x: x.sum() > 1, lambda x: 0.7 * x - 0.1, x
  ))(x)
  return lax.fori_loop(0, 3, lambda i, x: x / (i + 1), x), rows


def test_interpreted_programs_compute_the_same():
  x, w = (np.random.default_rng(i).normal(size=s).astype("f4")
          for i, s in enumerate(((4, 3), (2, 3, 3))))
  closed = jax.make_jaxpr(loops)(x, w)
  expected = jax.tree.leaves(jax.jit(loops)(x, w))
  plain, _ = jax.jit(interpret.interpreted(closed))(x, w)
  for rule, limit in ((None, 0), (interpret.permuted(0), 1e-5)):
    found, _ = jax.jit(interpret.interpreted(closed, rule))(x, w)
    for a, b in zip(found, plain if rule else expected, strict=True):
      np.testing.assert_allclose(a, b, atol=limit)
  with jax.enable_x64(True):
    wide, _ = jax.jit(interpret.interpreted(
      closed, interpret.in_float64, wide=True
    ))(x.astype("f8"), w.astype("f8"))
  assert {str(a.dtype) for a in wide} == {"float64"}
  for a, b in zip(wide, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(a) - np.asarray(b)).max() > 0


def test_nudged_arguments_change_by_one_unit():
  x = np.linspace(-2, 3, 11, dtype="float32")
  (near, n), (same, _) = (
    verdict.nudged([x, np.arange(3)], seed) for seed in (0, 0)
  )
  np.testing.assert_array_equal(near, same)
  np.testing.assert_array_equal(n, np.arange(3))
  unit = np.spacing(np.abs(x))
  assert np.all((np.abs(near - x) <= unit) & (near != x))


@pytest.mark.parametrize(("change", "words"), [
  (lambda x: 4 * x, "is 4 times too large over data"),
  (lambda x: x / 4, "is 0.25 times too large over data"),
  (lambda x: 0 * x, "is zero"), (lambda x: x[::-1], "another order"),
  (lambda x: np.where(np.arange(8)[:, None] < 6, x, 0),
   "right in 75% of the slices along dim 0 and zero"),
  (lambda x: x**2, ""), (lambda x: 3.7 * x, "is multiplied by 3.7"),
])
def test_simple_faults_are_explained(change, words):
  x = np.random.default_rng(0).normal(size=(8, 3))
  assert words in verdict.explain(x, change(x), None, {"data": 4})
  before = np.ones_like(x)
  found = verdict.explain(before + x, before + change(x), before, {"data": 4})
  assert words in found
  assert bool(found) == bool(words)
