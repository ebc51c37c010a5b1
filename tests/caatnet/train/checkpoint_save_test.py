"""Reading of checkpoints: event loops, and steps that are missing."""

import asyncio

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
