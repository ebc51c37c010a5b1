"""Tables of dtypes and devices, compared with independent sources."""

import importlib.util
import itertools
import math
import os
import subprocess
import sys
import time
import types

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import ml_dtypes
import pytest

from parallel.ledger import hlo, targets
from parallel.plans.hardware.clusters import CLUSTERS
from parallel.plans.hardware.devices import DEVICES


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
  """Multiprocessors, their FP32 cores, L2 in MiB and boost clock in GHz.

  Sources: NVIDIA's A100 and H100 white papers; ``deviceQuery`` on a B200.
  """
  sheets = {
    (8, 0): (108, 64, 40, 1.41), (9, 0): (132, 128, 50, 1.98),
    (10, 0): (148, 128, 126, 1.965),
  }
  for gpu in targets._GPUS.values():
    found = gpu["cores"], gpu["fpus"], gpu["l2"] / 2**20, gpu["clock"]
    assert found == sheets[gpu["major"], gpu["minor"]]


def test_cpu_target_has_the_first_devices_of_this_process():
  found = targets.resolve("cpu:2")
  assert found.devices == tuple(jax.devices("cpu")[:2])
  assert (found.name, found.hardware, found.levels) == ("cpu:2", None, ())
  count = len(jax.devices("cpu"))
  assert len(targets.resolve(f"cpu:{count}").devices) == count


@pytest.mark.parametrize(("name", "message"), [
  *((name, "must have the form tpu:GENERATION:TOPOLOGY") for name in (
    "", "cpu", "cpu:0", "cpu:x", "cpu:1:1", "CPU:1", "x:1", "tpu:v5p",
    "tpu:v5p:2x2x1:1:1", "gpu:h100", "gpu:h100:1x8:1", "x:h100:1x8",
  )),
  ("cpu:999", "CPU devices of this process; also pass --cpu_devices=999"),
  ("tpu:v9:2x2", "use one of v4, v5e, v5p, v6e, tpu7x"),
  ("tpu:v5p:2x2x1:x", "the number of slices 'x' must be"),
  ("tpu:v5p:2x2x1:0", "the number of slices '0' must be"),
  ("tpu:v5p:4", "the topology '4' must"), ("tpu:v5p:0x4", "'0x4' must have"),
  ("tpu:v5p:4x4", "v5p has no slice 4x4: its slices have 3 dims"),
  ("gpu:x100:1x8", "the GPU 'x100' is unknown; use one of a100, a100-pcie,"),
  ("gpu:h100:8", "'8' must be NODESxGPUS with at most 8"),
  ("gpu:h100:1x9", "'1x9' must be NODESxGPUS with at most 8 GPUs"),
  ("gpu:a100-pcie:2x8", "a100-pcie supports at most 1"),
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


@pytest.fixture
def asked(monkeypatch, tmp_path):
  """Replaces jax's description of devices; returns the arguments of calls.

  The plugins of TPUs and GPUs are not installed, and libtpu's lock is free.
  """
  calls = []

  def described(**arguments):
    shape = arguments.get("topology") or (
      arguments["topology_name"].partition(":")[2]
    )
    if shape in ("2x2x2", "1x3x1"):  # one that the platform refuses
      raise jax.errors.JaxRuntimeError("no such shape\nand more lines")
    calls.append(arguments)
    num = math.prod(map(int, shape.split("x")))
    return types.SimpleNamespace(devices=list(range(num)))

  monkeypatch.setattr(topologies, "get_topology_desc", described)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  monkeypatch.setattr(os, "environ", dict(os.environ))
  monkeypatch.setattr(targets, "_TPU_LOCK", str(tmp_path / "lock"))
  return calls


@pytest.mark.parametrize("gpu", targets._GPUS)
def test_gpu_target_has_the_nodes_and_rates_of_its_cluster(asked, gpu):
  largest = math.prod(level.size for level in CLUSTERS[gpu].levels[1:])
  for nodes, gpus in ((1, 2), (largest, CLUSTERS[gpu].levels[0].size)):
    found = targets.resolve(f"gpu:{gpu}:{nodes}x{gpus}")
    assert found.name == f"gpu:{gpu}:{nodes}x{gpus}"
    assert found.devices == tuple(range(nodes * gpus))
    assert found.hardware == DEVICES[gpu]
    assert math.prod(level.size for level in found.levels) == nodes * gpus
    assert found.levels[0].size == gpus
    assert found.levels[0].link == CLUSTERS[gpu].levels[0].link
    assert asked[-1]["platform"] == "cuda"
    assert asked[-1]["topology"] == f"{nodes}x{gpus}x1"
    config = asked[-1]["target_config"]
    # Pallas of jax 0.11 selects the architecture by this name.
    assert f'device_description_str: "NVIDIA {gpu.upper()}"' in config
    limits = dict(itertools.pairwise(config.split()))
    values = targets._GPUS[gpu]
    for name, value in {
      "core_count:": values["cores"], "fpus_per_core:": values["fpus"],
      "l2_cache_size:": values["l2"],
      "clock_rate_ghz:": values["clock"], "major:": 9,
      "memory_bandwidth:": int(DEVICES[gpu].memory_bandwidth),
      "device_memory_size:": DEVICES[gpu].memory_bytes,
      "shared_memory_per_block_optin:": values["optin"],
      "shared_memory_per_core:": values["shared"],
    }.items():
      assert limits[name] == str(value), name
  assert os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
  with pytest.raises(ValueError, match=f"{gpu} supports at most {largest}"):
    targets.resolve(f"gpu:{gpu}:{largest + 1}x1")


@pytest.mark.parametrize(("generation", "topology", "accelerator", "chip"), [
  ("v4", "2x2x1", "v4-8", "megacore"), ("v5e", "2x4", "v5litepod-4", "default"),
  ("v5p", "4x4x4", "v5p-8", "megacore"), ("v6e", "4x4", "v6e-4", "default"),
  ("tpu7x", "2x2x1", "tpu7x-8", "default"),
])
def test_tpu_target_is_one_level_of_chips(
  asked, generation, topology, accelerator, chip
):
  found = targets.resolve(f"tpu:{generation}:{topology}")
  assert asked == [{
    "platform": "tpu", "topology_name": f"{generation}:{topology}",
    "chip_config_name": chip, "num_slices": 1,
  }]
  # Without these variables libtpu queries a metadata server.
  assert os.environ["TPU_ACCELERATOR_TYPE"] == accelerator
  assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
  assert os.environ["TPU_WORKER_ID"] == "0"
  assert os.environ["TPU_WORKER_HOSTNAMES"] == "localhost"
  assert found.hardware == DEVICES[generation]
  (level,) = found.levels
  assert (level.size, level.link) == (
    len(found.devices), DEVICES[generation].link
  )
  assert len(found.devices) == math.prod(map(int, topology.split("x")))


@pytest.mark.parametrize("name", ["tpu:v5p:2x2x2", "gpu:h100:1x3"])
def test_refusal_of_the_platform_is_one_line(asked, name):
  with pytest.raises(ValueError) as error:
    targets.resolve(name)
  assert str(error.value) == f"--target={name}: no such shape"


HOLD = """import fcntl, sys
with open(sys.argv[1], "r+") as lock:
  fcntl.lockf(lock, fcntl.LOCK_SH if sys.argv[2] == "shared" else fcntl.LOCK_EX)
  print("held", flush=True)
  sys.stdin.read()
"""


@pytest.mark.parametrize("waits", [1, 3])
def test_libtpu_is_loaded_after_another_process_has_released_it(
  asked, monkeypatch, capsys, waits
):
  """The lock is released while the process sleeps for the n-th time."""
  with open(targets._TPU_LOCK, "w"):
    pass
  command = [sys.executable, "-S", "-c", HOLD, targets._TPU_LOCK]
  with subprocess.Popen(
    [*command, "exclusive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  ) as holder:
    assert holder.stdout.readline() == b"held\n"
    slept = []

    def sleep(seconds):
      slept.append(seconds)
      if len(slept) == waits:
        holder.communicate()

    monkeypatch.setattr(time, "sleep", sleep)
    targets.resolve("tpu:v5p:2x2x1")
    assert holder.returncode == 0
  assert slept == [1] * waits
  text = capsys.readouterr().err
  assert text.startswith("waiting for another process to release libtpu")
  assert text.count("\n") == 1


@pytest.mark.parametrize("allowed", [False, True])
def test_libtpu_is_loaded_if_no_process_forbids_it(asked, monkeypatch, allowed):
  """Shared locks do not exclude each other; a variable allows several."""
  with open(targets._TPU_LOCK, "w"):
    pass
  monkeypatch.setattr(time, "sleep", None)  # no process sleeps
  if allowed:
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
  command = [sys.executable, "-S", "-c", HOLD, targets._TPU_LOCK]
  with subprocess.Popen(
    [*command, "exclusive" if allowed else "shared"], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as holder:
    assert holder.stdout.readline() == b"held\n"
    assert targets.resolve("tpu:v5p:2x2x1").devices
    holder.communicate()
