"""Libraries of experts: storage, refused files, concurrent replacement."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from caatnet.serving import weights_file
from caatnet.serving.experts import INDEX, Library


def tree(value: float = 0.0):
  return {
    "blocks": {"w": np.full((2, 1, 3, 4), value, np.float32)},
    "norm": np.arange(4, dtype=np.float32),
  }


@pytest.fixture
def library(tmp_path):
  made = Library.create(tmp_path / "experts")
  made.add("base", tree(), origin="base")
  made.add("a", tree(1.0), kind="python", origin="fine-tuned")
  return made


def weight(library, name):
  return library.read(name)[1]()["blocks"]["w"].flat[0]


def test_weights_are_read_with_equal_bits(library):
  generator = np.random.default_rng(0)
  given = {
    "blocks": {"w": generator.standard_normal((2, 1, 3, 4), np.float32)},
    "norm": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
  }
  revision = library.add("b", given)
  found, load, *_ = library.read("b")
  assert found == revision == library.entry("b").sha256[:12]
  for x in (load(), load()):  # twice: it is loaded again after an eviction
    assert x["blocks"]["w"].tobytes() == given["blocks"]["w"].tobytes()
    assert x["norm"].tobytes() == given["norm"].tobytes()
  # Equal weights have equal files, which other programs read.
  assert library.add("c", given) == revision
  published = load_file(library.path / library.entry("b").file)
  assert published["blocks/w"].tobytes() == given["blocks"]["w"].tobytes()


@pytest.mark.parametrize(("given", "options", "message"), [
  ({"norm": np.zeros(4, np.float32)}, {}, "'blocks/w' is missing"),
  ({**tree(), "norm": np.zeros(5, np.float32)}, {}, r"float32\[5\], but"),
  ({**tree(), "norm": np.zeros(4, np.float16)}, {}, r"float16\[4\], but"),
  (tree(), {"tokenizer": "abc"}, "has the tokenizer 'abc', the library 'bytes"),
  (tree(), {"origin": "x"}, "origin='x' must be one of"),
  (tree(), {"form": "int8", "base": "zz"}, "expert 'zz' must be one of base"),
])
def test_other_parameters_are_refused(library, given, options, message):
  with pytest.raises(ValueError, match=message) as error:
    library.add("b", given, **options)
  assert "\n" not in str(error.value)
  assert library.names == ("base", "a")
  assert len([*library.path.glob("*.safetensors")]) == 2


@pytest.mark.parametrize("name", ["a", "auto", "", "x/y", "..", "a@1"])
def test_names_that_are_taken_or_not_allowed_are_refused(library, name):
  with pytest.raises(ValueError, match=r"must consist of|exists"):
    library.add(name, tree())


def damages():
  yield "missing", lambda path, data: path.unlink()
  yield "empty", lambda path, data: path.write_bytes(b"")
  yield "header only", lambda path, data: path.write_bytes(data[:30])
  yield "last byte missing", lambda path, data: path.write_bytes(data[:-1])
  yield "longer", lambda path, data: path.write_bytes(data + b"x")
  yield "bit", lambda path, data: path.write_bytes(
    data[:-1] + bytes([data[-1] ^ 1])
  )
  yield "header", lambda path, data: path.write_bytes(
    data.replace(b'"F32"', b'"F99"')
  )
  yield "no objects", lambda path, data: path.write_bytes(
    (2).to_bytes(8, "little") + b"[]"
  )


@pytest.mark.parametrize("damage", [d for _, d in damages()],
                         ids=[name for name, _ in damages()])
@pytest.mark.parametrize("name", ["a", "base"])
def test_damaged_file_fails_alone(library, name, damage):
  """Also if it was read before, and if it is the first of the library."""
  library.read(name)[1]()
  path = library.path / library.entry(name).file
  damage(path, path.read_bytes())
  with pytest.raises(ValueError, match=path.name) as error:
    library.read(name)[1]()
  assert "\n" not in str(error.value)
  assert weight(library, "a" if name == "base" else "base") in (0.0, 1.0)
  library.replace(name, tree(3.0))
  assert weight(library, name) == 3.0


@pytest.mark.parametrize("text", [
  "", "{}x", '{"experts": [{"name": "a"}]}', "[1]", '{"a": 1}',
  *(
    json.dumps({"experts": [dict.fromkeys(
      ("name", "file", "sha256", "kind", "description", "origin"), "base"
    ) | wrong]})
    for wrong in ({"file": "../x"}, {"origin": "elsewhere"}, {"kind": 1})
  ),
])
def test_damaged_list_is_refused(library, text):
  (library.path / INDEX).write_text(text)
  with pytest.raises(ValueError, match=r"experts\.json is damaged"):
    Library(library.path)


def test_difference_from_another_base_is_refused(library):
  delta = {"blocks": {"w": np.zeros((2, 1, 3, 4), np.float32)},
           "norm": np.zeros(4, np.float32)}
  library.add("d", delta, form="low_rank", base="base")
  assert library.read("d")[2:] == ("low_rank", "base")
  with pytest.raises(ValueError, match="'d' must be another expert, stored wh"):
    library.add("e", delta, form="low_rank", base="d")
  library.remove("d")
  with pytest.raises(ValueError, match="'base' must be another expert"):
    library.replace("base", delta, form="low_rank", base="base")
  library.add("d", delta, form="low_rank", base="base")
  for change in (
    lambda: library.replace("base", tree(5.0)), lambda: library.remove("base")
  ):
    with pytest.raises(ValueError, match="'base' is the base of 'd'"):
      change()
  # A list that another program wrote.
  content = json.loads((library.path / INDEX).read_text())
  del content["experts"][0]
  (library.path / INDEX).write_text(json.dumps(content))
  with pytest.raises(ValueError, match="'d' is a difference from the base"):
    Library(library.path).read("d")


def test_reader_gets_the_weights_of_its_revision_after_a_replacement(library):
  old, load, *_ = library.read("a")
  other = Library(library.path)  # another process
  new = other.replace("a", tree(2.0))
  assert load()["blocks"]["w"].flat[0] == 1.0
  assert library.read("a")[0] == new != old
  assert weight(library, "a") == 2.0
  assert library.entry("a").kind == "python"
  other.remove("a")
  with pytest.raises(ValueError, match="expert 'a' must be one of base"):
    library.read("a")
  assert len([*library.path.iterdir()]) == 3  # base, list, lock


def test_concurrent_replacements_are_read_whole(library):
  """Weights of a read are all of one revision, and no read fails."""
  done = threading.Event()
  wrong = []

  def read():
    reader, revisions = Library(library.path), {}
    while not done.is_set():
      revision, load, *_ = reader.read("a")
      found = set(load()["blocks"]["w"].flat)
      if len(found) > 1 or revisions.setdefault(revision, found) != found:
        wrong.append(found)

  threads = [threading.Thread(target=read) for _ in range(2)]
  for thread in threads:
    thread.start()
  for value in range(40):
    library.replace("a", tree(float(value)))
  done.set()
  for thread in threads:
    thread.join()
  assert not wrong


# Replaces an expert in processes that are killed before each line that is
# executed in functions that change files.
_KILLED = """
import os, signal, sys
import numpy as np
from parallel.base import atomic
from caatnet.serving import experts, weights_file
path = sys.argv[1]
changing = {f.__code__ for f in (
  experts.Library._write, experts.Library._store, weights_file.write,
  weights_file.replace, atomic.atomic_file.__wrapped__, atomic._sync,
)}

def tree(value):
  return {"w": np.full((3, 4), value, np.float32)}

def weight():
  (weight,) = set(experts.Library(path).read("a").load()["w"].flat)
  return weight

def killed_at(last):
  left = last
  def trace(frame, event, _):
    nonlocal left
    if frame.f_code not in changing:
      return None
    left -= event == "line"
    if not left:
      os.kill(os.getpid(), signal.SIGKILL)
    return trace
  library = experts.Library(path)
  sys.settrace(trace)
  library.replace("a", tree(last))
  os._exit(0)

experts.Library.create(path).add("a", tree(0))
before, seen = 0, []
for last in range(1, 10_000):
  child = os.fork()
  if not child:
    killed_at(last)
  status = os.waitpid(child, 0)[1]
  found = weight()
  assert found in (before, last), (found, before, last)
  seen.append(found == last)
  if not status:
    break
  experts.Library(path).replace("a", tree(-last))
  before = weight()
  assert before == -last
  assert len(os.listdir(path)) == 3, os.listdir(path)  # list, lock and a
assert seen == sorted(seen), "the new weights, then the old ones"
print(seen.count(False), seen.count(True))
"""


def test_killed_writer_leaves_the_old_or_the_new_weights(tmp_path):
  """The next replacement also deletes the files that it has left."""
  found = subprocess.run(
    [sys.executable, "-c", _KILLED, tmp_path / "experts"],
    capture_output=True, text=True, check=False,
  )
  assert not found.returncode, found.stderr
  old, new = map(int, found.stdout.split())
  assert old > 50
  assert new > 10  # killed after the list was replaced


@pytest.mark.parametrize("offsets", [[0, 8], [4, 20], [0, 17], [-4, 12]])
def test_tensors_that_overlap_or_leave_gaps_are_refused(tmp_path, offsets):
  path = tmp_path / "x.safetensors"
  weights_file.write(path, {"a": np.zeros(4, np.float32)}, {})
  weights_file.WeightsFile(path).header()
  text = json.dumps({"a": {
    "dtype": "F32", "shape": [4], "data_offsets": offsets,
  }}).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
  with pytest.raises(ValueError, match="a has invalid offsets"):
    weights_file.WeightsFile(path).header()
