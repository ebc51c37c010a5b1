"""Random changes of single bytes in stored arrays.

Every change is an error of one line, or changes no value that is read. The
number of changes per row is the variable ``FLIPS``.
"""

import collections
import contextlib
import dataclasses
import pickle
import re

from etils import epath
import jax
import numpy as np
import pytest

from caatnet.federated import server, snapshot
from caatnet.interop import tensors
from caatnet.interop.source import open_published_model
from caatnet.serving.router import Router
from caatnet.train.checkpoint import slices
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.elastic import swarm_loop
from tests import malformed_test
from tests.caatnet.federated import numeric
from tests.caatnet.train import linear_model as toy
from tests.corruption import FLIPS, flip

EXPERIMENT = toy.make()


def draw(*shape):
  return np.random.default_rng(len(shape)).standard_normal(shape).astype("f4")


def state():
  """Returns a state whose parameters and moments are not stored inline."""
  made = EXPERIMENT.init_state()
  params = {"w": jax.numpy.asarray(draw(1, 64, 33)), "b": made.params["b"]}
  return made._replace(params=params, opt_state=(params, made.opt_state))


def make_checkpoint(folder):
  with contextlib.closing(
    Checkpointer(folder, EXPERIMENT.program, keep=2)
  ) as checkpointer:
    for step in (1, 2):
      made = state()
      checkpointer.save(
        made._replace(step=made.step + step), {"next": step, "seeds": [3, 4]}
      )


def read_checkpoint(folder):
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state(),
  )
  reader = Checkpointer(folder, EXPERIMENT.program)
  with contextlib.closing(reader):
    return jax.tree.map(np.asarray, reader.restore(abstract, 2))


def make_slices(folder):
  w, b = draw(1, 3, 20, 21), draw(1, 5)
  (folder / "checkpoints").mkdir()
  slices.write_params(folder / "checkpoints", 2, {
    "w": slices.SlicedArray(w.shape, w.dtype, (1, 1, 20, 21), lambda: (
      ((0, row), w[0, row]) for row in range(3))),
    "b": slices.SlicedArray(b.shape, b.dtype, b.shape, lambda: [((0,), b[0])]),
  })


def read_slices(folder):
  reader = Checkpointer(folder, EXPERIMENT.program)
  with contextlib.closing(reader):
    params, _ = reader.open_params(2)
    return [[*params["w"].rows((0,))], params["b"].at((0,))]


def read_export(folder):
  source = open_published_model(folder, 1)
  return source.fields, source.section, source.tokenizer.identity, [
    (name, tensors.read(x, name)) for name, x in sorted(source.tensors.items())
  ]


def make_federated(folder):
  made = server.initial_state(numeric.PARAMS, numeric.Plain())
  snapshot.write(folder / "server.npz", dataclasses.replace(
    made, params=draw(200), published=draw(200, 1)[:, 0],
    optimizer=(draw(200),), differences=(b"abc" * 9,),
  ), numeric.rules())


def make_router(folder):
  Router(("a", "b"), draw(64, 2), draw(2)).write(folder)


# Name -> (what is changed in a folder, writer of the folder, reader).
STORED = {
  "checkpoint": ("checkpoints/2", make_checkpoint, read_checkpoint),
  "checkpoint in slices": ("checkpoints/2", make_slices, read_slices),
  "export": ("", malformed_test.make_export, read_export),
  "federated state": ("", make_federated, lambda folder: dataclasses.asdict(
    snapshot.read(folder / "server.npz", numeric.rules()))),
  "swarm state": ("swarm", lambda folder: swarm_loop._write_shared_state(
    epath.Path(folder), 2, 1, {"a": draw(200), "b": b"c" * 9}
  ), lambda folder: swarm_loop._read_shared_state(epath.Path(folder), 2)),
  "router": ("", make_router, lambda folder: dataclasses.astuple(
    Router.read(folder))),
}


# Orbax leaves a coroutine behind when it reads damaged metadata.
@pytest.mark.filterwarnings(
  "ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("name", STORED)
def test_changed_bytes_are_detected_or_not_read(tmp_path, name):
  place, make, read = STORED[name]
  make(tmp_path)
  expected = pickle.dumps(read(tmp_path))
  counts, found = collections.Counter(), []
  for seed in range(FLIPS):
    path, at, old = flip(tmp_path / place, seed)
    line = malformed_test.failure(lambda: found.append(read(tmp_path)))
    if not line:
      same = pickle.dumps(found.pop()) == expected
      assert same, f"byte {at} of {path} changes what is read"
    counts["detected" if line else "not read"] += 1
    data = bytearray(path.read_bytes())
    data[at] = old
    path.write_bytes(data)
  print(f"{name}: {dict(counts)}")
  assert counts["detected"] > FLIPS // 4


@pytest.mark.parametrize("name", ["federated state", "swarm state"])
def test_an_npz_file_whose_list_of_arrays_is_shorter_is_refused(tmp_path, name):
  """The comment of an entry may cover the entries of other arrays."""
  place, make, read = STORED[name]
  make(tmp_path)
  expected, found = pickle.dumps(read(tmp_path)), []
  (path,) = (tmp_path / place).glob("*.npz")
  data = path.read_bytes()
  for entry in re.finditer(b"PK\1\2", data):
    at = entry.start() + 32  # length of its comment
    for value in range(1, 256):
      path.write_bytes(data[:at] + bytes([data[at] ^ value]) + data[at + 1 :])
      if not malformed_test.failure(lambda: found.append(read(tmp_path))):
        assert pickle.dumps(found.pop()) == expected, (at, value)
