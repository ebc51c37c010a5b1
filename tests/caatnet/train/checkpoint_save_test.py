"""Reading of checkpoints: event loops, and steps that are missing."""

import asyncio
import json
import shutil

import pytest

from caatnet.train.checkpoint.save import Checkpointer, waiting_for_arrays
from tests.caatnet.train import linear_model as toy


@pytest.mark.parametrize("error", [None, OSError("damaged")])
def test_other_event_loops_are_those_of_the_process(error):
  policy = asyncio.get_event_loop_policy()
  try:
    with waiting_for_arrays():
      assert asyncio.get_event_loop_policy() is not policy
      if error:
        raise error
  except OSError:
    assert error
  assert asyncio.get_event_loop_policy() is policy


def test_checkpoints_are_listed_kept_and_read_by_their_steps(tmp_path):
  """The newest two are kept; steps are numbers, not names."""
  experiment = toy.make(workers=3)
  abstract = experiment.abstract_state()
  checkpointer = Checkpointer(tmp_path, experiment.program, keep=2)
  assert (checkpointer.steps(), checkpointer.latest_step()) == ([], None)
  assert checkpointer.path(None) == "none yet"
  with pytest.raises(FileNotFoundError, match="no checkpoint in"):
    checkpointer.restore(abstract)
  state = experiment.init_state()
  for step in (8, 9, 10, 10):  # the same step again is not written
    checkpointer.save(
      state._replace(step=state.step + step), {"next": 2 * step}
    )
    checkpointer.wait()
  assert checkpointer.steps() == [9, 10]
  assert checkpointer.latest_step() == 10
  assert checkpointer.path(9) == str(tmp_path / "checkpoints" / "9")
  assert checkpointer.num_workers() == checkpointer.num_workers(9) == 3
  for asked, expected in ((None, 10), (9, 9)):
    found, position = checkpointer.restore(abstract, asked)
    assert (int(found.step), position) == (expected, {"next": 2 * expected})
    assert (found.params["w"] == state.params["w"]).all()
    names, step = checkpointer.open_params(asked)
    assert step == expected
    assert (names["w"].at((2,)) == state.params["w"][2]).all()
  with pytest.raises(FileNotFoundError, match=r"step 8 .* there are 9, 10"):
    checkpointer.restore(abstract, 8)
  checkpointer.close()


class _Deleted(Checkpointer):
  """Reader of checkpoints whose trainer deletes step 2 before it is read."""

  def num_workers(self, step=None):
    if step == 2:
      shutil.rmtree(self.directory / "2")
    return super().num_workers(step)


def test_evaluation_reads_another_checkpoint_only_if_its_own_is_deleted(
  tmp_path
):
  experiment = toy.make()
  abstract = experiment.abstract_state()
  wanted = abstract.params, abstract.outer
  writer = Checkpointer(tmp_path, experiment.program, keep=9)
  state = experiment.init_state()
  for step in (1, 2):
    writer.save(state._replace(step=state.step + step), {})
  writer.close()
  shutil.copytree(tmp_path, tmp_path / "copy")
  reader = _Deleted(tmp_path, experiment.program)
  params, _, step, workers = reader.restore_params(*wanted)
  assert (step, workers) == (1, 1)
  assert (params["w"] == state.params["w"]).all()
  with pytest.raises(ValueError, match=r"checkpoints/2 .* has no params"):
    _Deleted(tmp_path / "copy", experiment.program).restore_params(*wanted, 2)
  shutil.rmtree(tmp_path / "checkpoints" / "1" / "params")  # damaged, not gone
  with pytest.raises(ValueError, match="1 is damaged: params is missing"):
    reader.restore_params(*wanted)


def write(folder, *steps, workers=1):
  """Writes checkpoints; returns the experiment and its initial state."""
  experiment = toy.make(workers=workers)
  state, abstract = experiment.init_state(), experiment.abstract_state()
  writer = Checkpointer(folder, experiment.program, keep=9)
  for step in steps:
    writer.save(state._replace(step=state.step + step), {"next": step})
    writer.wait()
  writer.close()
  return Checkpointer(folder, experiment.program), state, abstract


def large_file(folder):
  return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def test_a_damaged_checkpoint_is_named_with_an_intact_one(tmp_path):
  """All readers raise the same error, and the command in it works."""
  reader, _, abstract = write(tmp_path, 1, 2, 3)
  path = tmp_path / "checkpoints"
  # The sums of a value: as if the value had changed since.
  for step, name in ((3, "params"), (2, "rest")):
    sums = path / str(step) / "checksums" / "metadata"
    before, text, after = sums.read_text().partition(f'"{name}": {{')
    sums.write_text(before + text + after.replace(', ["', ', ["f', 1))
  for read in (
    lambda: reader.restore(abstract), reader.open_params,
    lambda: reader.restore_params(abstract.params, {}),
  ):
    with pytest.raises(ValueError, match=(
      f"{path}/3 is damaged: params.b has another checksum .* Step 1 is intact"
      f".* --step=1; .* `mv {path}/3 {tmp_path}/damaged_3`"
    )):
      read()
  (path / "3").rename(tmp_path / "damaged_3")
  with pytest.raises(ValueError, match=r"rest.key has .* `mv"):
    reader.restore(abstract)
  (path / "2").rename(tmp_path / "damaged_2")
  assert int(reader.restore(abstract)[0].step) == 1
  position = path / "1" / "position" / "metadata"
  position.write_text(position.read_text().replace("1", "2"))
  with pytest.raises(ValueError, match="damaged: position has another check"):
    reader.restore(abstract)


def test_a_missing_file_is_named(tmp_path):
  reader, _, abstract = write(tmp_path, 1)
  path = large_file(tmp_path / "checkpoints" / "1" / "params")
  path.unlink()
  with pytest.raises(ValueError, match=f"the file params/.*{path.name} is mis"):
    reader.restore(abstract)


def test_damaged_metadata_are_named_with_an_intact_checkpoint(tmp_path):
  reader, _, abstract = write(tmp_path, 1, 2)
  for name, old in (
    ("params/array_metadatas/process_0", b"]}"),
    ("rest/array_metadatas/process_0", b"param_name"),
    ("params/_sharding", b'"}'), ("rest/_METADATA", b"}}"),
    ("checksums/metadata", b"}"), ("position/metadata", b"}"),
  ):
    path = tmp_path / "checkpoints" / "2" / name
    whole = path.read_bytes()
    path.write_bytes(whole.replace(old, b"x"))
    with pytest.raises(ValueError, match=(
      f"2 is damaged: the file {name} cannot be read: .* Step 1 is intact"
    )):
      reader.restore(abstract)
    path.write_bytes(whole)


def test_checksums_of_other_arrays_or_without_rows_are_damaged(tmp_path):
  reader, _, abstract = write(tmp_path, 1)
  path = tmp_path / "checkpoints" / "1" / "checksums" / "metadata"
  whole = json.loads(path.read_text())
  sums = whole["params"]
  for changed, message in (
    ({"w": sums["w"]}, "params/_METADATA names other arrays than checksums"),
    (sums | {"b": [sums["b"][0], []]}, "params.b has another checksum"),
  ):
    path.write_text(json.dumps(whole | {"params": changed}))
    with pytest.raises(ValueError, match=f"1 is damaged: {message}"):
      reader.restore(abstract)


def test_checkpoints_without_checksums_are_restored_with_a_line(
  tmp_path, capsys
):
  reader, state, abstract = write(tmp_path, 1)
  shutil.rmtree(tmp_path / "checkpoints" / "1" / "checksums")
  assert (reader.restore(abstract)[0].params["w"] == state.params["w"]).all()
  reader.open_params()
  assert capsys.readouterr().err.count("its arrays are not verified\n") == 2


@pytest.mark.parametrize(("there", "here"), [(1, 3), (3, 1), (2, 3)])
def test_checksums_are_of_each_worker(tmp_path, there, here):
  """Workers that leave or join do not change the checksums of the others."""
  write(tmp_path, 1, workers=there)
  experiment = toy.make(workers=here)
  abstract = experiment.abstract_state()
  reader = Checkpointer(tmp_path, experiment.program)
  assert int(reader.restore(abstract)[0].step) == 1
  sums = tmp_path / "checkpoints" / "1" / "checksums" / "metadata"
  text = sums.read_text()
  last = text.rindex('"', 0, text.index(']', text.index('"w"')))
  digit = "0" if text[last - 1] != "0" else "1"
  sums.write_text(text[: last - 1] + digit + text[last:])
  if there > here:  # the last worker is not read
    reader.restore_params(abstract.params, {})
  else:
    with pytest.raises(ValueError, match=r"params\.w has another"):
      reader.restore_params(abstract.params, {})
