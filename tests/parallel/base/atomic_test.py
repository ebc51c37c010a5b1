"""Properties of files that are replaced atomically."""

import concurrent.futures
import errno
import os

import pytest

from parallel.base import atomic


@pytest.mark.quick
@pytest.mark.parametrize(("error", "name"), [
  (OSError(errno.ENOSPC, "full"), "here"),
  (OSError(errno.ENOSPC, "full", "there"), "there"),
  (OSError("no error of the system"), None),
])
def test_error_of_the_system_names_its_file(error, name):
  with pytest.raises(OSError) as raised, atomic.name_file_in_errors("here"):
    raise error
  assert raised.value.filename == name


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
  path = tmp_path / "file.npz"
  path.write_text("old")

  def write():
    with atomic.atomic_file(path) as temporary:
      assert temporary.suffix == path.suffix
      temporary.write_text("half of the n")
      raise OSError(errno.ENOSPC, "No space left on device")

  with pytest.raises(OSError, match="No space left") as raised:
    write()
  assert raised.value.filename == str(path)
  assert path.read_text() == "old"
  assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_disk_before_its_name_and_the_name_at_the_end(
  tmp_path, monkeypatch
):
  """Records each fsync: what it waits for, and the file's text at the time."""
  path, seen, fsync = tmp_path / "file", [], os.fsync
  path.write_text("old")

  def recorded(descriptor):
    fsync(descriptor)
    is_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
    seen.append((is_folder, path.read_text()))

  monkeypatch.setattr(os, "fsync", recorded)
  with atomic.atomic_file(path) as temporary:
    temporary.write_text("new")
  assert seen == [(False, "old"), (True, "new")]


def test_concurrent_writers_of_a_file_leave_one_whole_text(tmp_path):
  """Checks that neither fails, no reader sees a part, and no file is left."""
  path, texts = tmp_path / "new" / "file", [c * 300_000 for c in "ab"]

  def write(text, times):
    for _ in range(times):
      with atomic.atomic_file(path) as temporary:
        temporary.write_text(text)

  write(texts[0], 1)

  with concurrent.futures.ThreadPoolExecutor(2) as writers:
    written = [writers.submit(write, text, 40) for text in texts]
    while not all(job.done() for job in written):
      assert path.read_text() in texts
  for job in written:
    job.result()
  assert [x.name for x in path.parent.iterdir()] == ["file"]


def test_path_that_cannot_be_written_is_named_before_the_work(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").write_text("")
  for path, is_folder in (
    ("file", False), ("new/a/b", False), (tmp_path, True), ("new", True)
  ):
    atomic.check_writable(path, "--x=", is_folder)
  for path, is_folder, reason in (
    ("file", True, "it is not a folder"), (".", False, "it is not a file"),
    ("file/a/b", False, f"{tmp_path}/file is not a folder"),
    ("/dev/null", False, "it is not a file"),
  ):
    with pytest.raises(ValueError, match="cannot") as error:
      atomic.check_writable(path, "--x=", is_folder)
    assert str(error.value) == f"--x={path} cannot be written: {reason}"


def test_files_of_killed_writers_are_removed(tmp_path):
  path, other = tmp_path / "file.npz", tmp_path / ".files.1_a.npz"
  other.write_text("of another file")
  path.write_text("whole")
  with atomic.atomic_file(path) as temporary:
    left = temporary.with_name(temporary.name.replace(".file.", ".file.9"))
    left.write_text("of a process that was killed")
    temporary.write_text("new")
  atomic.remove_unfinished(path)
  assert sorted(tmp_path.iterdir()) == [other, path]
  assert path.read_text() == "new"
