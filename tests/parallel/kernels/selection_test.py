"""Preferences, and the choice of the first kernel that is not refused."""

import functools

import pytest

from parallel.kernels import selection


@pytest.mark.quick
def test_preferences_expand_to_names():
  kernels = {"tpu": ("a", "b"), "gpu": ("c",)}
  expand = functools.partial(selection.preference, kernels=kernels)
  assert expand("auto", "tpu") == ("a", "b", "reference")
  assert expand("auto", "rocm") == ("reference",)
  assert expand("auto") == ("reference",)  # on CPUs
  assert expand("c_interpret") == ("c_interpret",)
  assert expand(["b", "reference"]) == ("b", "reference")
  every = ("a", "b", "c", "a_interpret", "b_interpret", "c_interpret")
  assert expand([*every, "reference"]) == (*every, "reference")
  for wrong in ([], "d", ["a", "d"], "reference_interpret"):
    with pytest.raises(ValueError, match="one or more of a, b, c, a_interpret"):
      expand(wrong)


@pytest.mark.quick
def test_choice_names_every_refused_kernel():
  kernels = {"tpu": ("a", "b"), "gpu": ("c",)}
  reasons = {"a": "too wide", "b": None, "c": "no rows"}

  def choose(*names):
    return selection.choose("op", names, reasons.get, kernels)

  found = choose("a_interpret", "b_interpret", "reference")
  assert found == ("b_interpret", {"a_interpret": "too wide"})
  assert (found.kind, found.interpret) == ("b", True)
  found = choose("c", "reference", "b")
  assert found == ("reference", {"c": "no rows"})
  assert (found.kind, found.interpret) == ("reference", False)
  with pytest.raises(
    ValueError, match=r"op: no implementation can be used \(a: too wide; c: no"
  ):
    choose("a", "c")
