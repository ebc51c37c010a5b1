"""Tables of dtypes and devices, compared with independent sources."""

import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from parallel.xla import hlo, targets


def bits_of(dtype):
  """Bits per element in numpy or ml_dtypes; None if neither has the dtype."""
  if dtype == "bool":
    return 8
  for known in (jnp.finfo, jnp.iinfo, ml_dtypes.finfo, ml_dtypes.iinfo):
    try:
      return known(dtype).bits
    except (ValueError, TypeError):
      continue
  return None


def test_bits_equal_those_of_the_dtypes():
  found = {dtype: bits for dtype, bits in hlo._DTYPES.values()}
  known = {dtype: bits_of(dtype) for dtype in found}
  # Some have other names (c64 has two floats), others do not exist in numpy.
  compared = {
    dtype for dtype, bits in known.items()
    if bits is not None and not dtype.startswith("complex")
  }
  assert {"bfloat16", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn",
          "int4", "uint2", "int64", "float32", "bool"} <= compared
  assert {d: found[d] for d in compared} == {d: known[d] for d in compared}
  assert (found["complex64"], found["complex128"]) == (64, 128)


def test_block_shared_memory_is_one_kib_below_the_device_s():
  """CUDA C++ Programming Guide, "Technical Specifications": 164 and 228 KiB."""
  shared = {(8, 0): 164, (9, 0): 228, (10, 0): 228}
  for gpu in targets._GPUS.values():
    kib = shared[gpu["major"], gpu["minor"]]
    assert gpu["shared"] == kib * 1024
    assert gpu["optin"] == (kib - 1) * 1024
    assert gpu["l2"] % 2**20 == 0


def test_gpus_have_the_sizes_of_their_data_sheets():
  """Multiprocessors, L2 in MiB and boost clock in GHz.

  Sources: NVIDIA's A100 and H100 white papers; ``deviceQuery`` on a B200.
  """
  sheets = {
    (8, 0): (108, 40, 1.41), (9, 0): (132, 50, 1.98), (10, 0): (148, 126, 1.965)
  }
  for gpu in targets._GPUS.values():
    found = gpu["cores"], gpu["l2"] / 2**20, gpu["clock"]
    assert found == sheets[gpu["major"], gpu["minor"]]


def test_cpu_target_has_the_first_devices_of_this_process():
  found = targets.resolve("cpu:2")
  assert found.devices == tuple(jax.devices("cpu")[:2])
  assert (found.name, found.hardware, found.levels) == ("cpu:2", None, ())
  assert not found.compiler_options
  count = len(jax.devices("cpu"))
  assert len(targets.resolve(f"cpu:{count}").devices) == count


@pytest.mark.parametrize(("name", "message"), [
  *((name, "is not tpu:GENERATION:TOPOLOGY") for name in (
    "", "cpu", "cpu:0", "cpu:x", "cpu:1:1", "CPU:1", "x:1", "tpu:v5p",
    "tpu:v5p:2x2:1", "gpu:h100", "gpu:h100:1x8:1", "x:h100:1x8",
  )),
  ("cpu:999", "this process has .* CPU devices; pass --cpu_devices=999"),
  ("tpu:v9:2x2", "known: v4, v5e, v5p, v6e, tpu7x"),
  ("tpu:v5p:4", "'4' is no topology"), ("tpu:v5p:0x4", "is no topology"),
  ("tpu:v5p:4x4", "there is no v5p slice 4x4: its slices have 3 dims"),
  ("gpu:x100:1x8", "no GPU 'x100'; known: a100, a100-pcie, h100, h200, b200"),
  ("gpu:h100:8", "'8' is not NODESxGPUS with at most 8"),
  ("gpu:h100:1x9", "'1x9' is not NODESxGPUS with at most 8 GPUs"),
  ("gpu:a100-pcie:2x8", "at most 1 nodes of a100-pcie"),
])
def test_unknown_target_is_an_error(name, message):
  with pytest.raises(ValueError, match=message):
    targets.resolve(name)


@pytest.mark.parametrize(("name", "message"), [
  ("tpu:v5p:2x2x1", "needs libtpu"), ("tpu:v5e:16x16", "needs libtpu"),
  # The largest node, and the largest number of nodes.
  ("gpu:a100-pcie:1x8", "needs the CUDA plugin"),
  ("gpu:h100:1x1", "needs the CUDA plugin"),
])
def test_target_without_its_plugin_names_the_extra(monkeypatch, name, message):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=f"--target={name} {message}"):
    targets.resolve(name)
