"""Reading of checkpoints: event loops, and steps that are missing."""

import asyncio
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
  with pytest.raises(ValueError, match="checkpoints/2 has no params"):
    _Deleted(tmp_path / "copy", experiment.program).restore_params(*wanted, 2)
  shutil.rmtree(tmp_path / "checkpoints" / "1" / "params")  # damaged, not gone
  with pytest.raises(ValueError, match="checkpoints/1 has no params"):
    reader.restore_params(*wanted)
