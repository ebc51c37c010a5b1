"""XLA options by the kind of device, and as a user writes them."""

import types

import pytest

from parallel.ledger import compiler_options


@pytest.mark.parametrize(("platform", "kind", "prefix", "has_early"), [
  ("cpu", "cpu", "", False), ("gpu", "NVIDIA H200", "xla_gpu_", False),
  ("tpu", "TPU v5", "xla_tpu_", True), ("tpu", "TPU v5 lite", "", False),
  ("tpu", "TPU v6 lite", "xla_tpu_", True), ("tpu", "TPU v4", "", False),
])
def test_options_are_those_of_the_platform(platform, kind, prefix, has_early):
  device = types.SimpleNamespace(platform=platform, device_kind=kind)
  whole, cut = (
    compiler_options.of_device(device, in_pieces) for in_pieces in (False, True)
  )
  assert bool(whole) == bool(prefix)
  assert {*whole.values()} <= {True}  # all of them enable something
  assert all(name.startswith(prefix) for name in cut)
  assert (cut.items() > whole.items()) == has_early
  assert has_early or cut == whole
  cut.clear()  # each call returns its own
  again = compiler_options.of_device(device, True)
  assert whole.items() <= again.items()


def test_options_of_a_user_are_parsed():
  assert compiler_options.parse("") == {}
  text = " xla_a=true  xla_b=false xla_c=1,2=3 xla_d="
  assert compiler_options.parse(text) == {
    "xla_a": True, "xla_b": False, "xla_c": "1,2=3", "xla_d": "",
  }


@pytest.mark.parametrize(("text", "message"), [
  ("xla_a", "'xla_a' must have the form xla_NAME=VALUE"),
  ("--xla_a=1", "'--xla_a=1' must have the form xla_NAME=VALUE"),
  ("xla_a=1 xla_b=2 xla_a=1", "xla_a is given twice"),
])
def test_other_forms_are_refused(text, message):
  with pytest.raises(ValueError, match=message) as error:
    compiler_options.parse(text)
  assert "\n" not in str(error.value)
