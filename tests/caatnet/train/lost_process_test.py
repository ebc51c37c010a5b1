"""Errors by which a run ends, as users see them."""

import jax
import pytest

from caatnet.train import loop

CLOSED = "UNAVAILABLE: connection closed\nmore"


def raised(error, workdir):
  """Returns the error of a run whose construction raises ``error``."""
  def make(*_):
    raise error

  with pytest.raises((RuntimeError, ValueError, OSError)) as found:
    loop.train(None, workdir, make=make)
  return found.value


@pytest.mark.parametrize(("text", "num_processes", "lost"), [
  (CLOSED, 2, True), (CLOSED, 3, True), (CLOSED, 1, False),
  ("DEADLINE_EXCEEDED: barrier", 2, True),
  ("FAILED_PRECONDITION: buffer", 2, True),
  ("the message says UNKNOWN: nothing", 2, False),
])
@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_lost_process_is_recognised_by_its_status(
  kind, text, num_processes, lost, monkeypatch, tmp_path
):
  monkeypatch.setattr(jax, "process_count", lambda: num_processes)
  error = kind(text)
  found = raised(error, tmp_path)
  if not lost:
    assert found is error
    return
  assert isinstance(found, loop.LostProcessError)
  assert f"({text.splitlines()[0]})" in str(found)
  assert "\n" not in str(found)


def test_memory_that_a_step_exhausts_is_one_line(tmp_path):
  error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB\nmore")
  found = raised(error, tmp_path)
  assert isinstance(found, ValueError)
  assert str(found).startswith(
    "a step does not fit into memory (RESOURCE_EXHAUSTED: 9 GB): use "
  )
  assert "\n" not in str(found)


def test_error_of_the_system_names_the_folder(tmp_path):
  ours = FileNotFoundError("config.train.init_from=x holds no run")
  assert raised(ours, tmp_path) is ours
  found = raised(PermissionError(13, "Permission denied"), tmp_path / "run")
  assert isinstance(found, ValueError)
  assert str(found).startswith(f"--workdir={tmp_path / 'run'}: ")
  assert "Permission denied" in str(found)
