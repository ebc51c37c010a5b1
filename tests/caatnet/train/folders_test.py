"""Folders that are written as a whole or not at all, and reserved ones."""

import errno
import fcntl
import os

import pytest

from parallel.base import files


def test_folder_appears_with_all_of_its_files(tmp_path):
  path = tmp_path / "above" / "new"
  for _ in range(2):  # the second time, files of a killed writer are there
    with files.atomic_folder(path) as partial:
      assert not path.exists()
      assert not list(partial.iterdir())
      (partial / "a").write_text("a")
      (partial / "b").mkdir()
      (partial / "b" / "c").write_text("c")
    assert sorted(p.name for p in path.rglob("*")) == ["a", "b", "c"]
    assert [p.name for p in path.parent.iterdir()] == ["new"]
    path.rename(partial)


@pytest.mark.parametrize(("error", "kind", "message"), [
  (KeyError("k"), KeyError, "k"),
  (OSError(errno.ENOSPC, "No space left"), ValueError, "new.*No space left"),
])
def test_failed_folder_leaves_nothing(error, kind, message, tmp_path):
  def write():
    with files.atomic_folder(tmp_path / "new") as partial:
      (partial / "a").write_text("a")
      raise error

  with pytest.raises(kind, match=message):
    write()
  assert not list(tmp_path.iterdir())


def test_folder_replaces_nothing(tmp_path):
  """A rename would replace an empty folder."""
  (tmp_path / "folder").mkdir()
  (tmp_path / "file").write_text("kept")
  (tmp_path / "link").symlink_to("nowhere")
  for name in ("folder", "file", "link"):
    with (
      pytest.raises(FileExistsError, match=f"{name} exists"),
      files.atomic_folder(tmp_path / name),
    ):
      raise AssertionError
  with (
    pytest.raises(ValueError, match="file is not a folder"),
    files.atomic_folder(tmp_path / "file" / "new"),
  ):
    raise AssertionError
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ["file", "folder", "link"]


def test_folder_has_one_writer(tmp_path):
  partial = tmp_path / ".new.partial"
  partial.mkdir()
  (partial / "a").write_text("of the other process")
  other = os.open(partial, os.O_RDONLY)
  fcntl.flock(other, fcntl.LOCK_EX)
  with (
    pytest.raises(ValueError, match=r"new is being written by another process"),
    files.atomic_folder(tmp_path / "new"),
  ):
    raise AssertionError
  assert (partial / "a").exists()
  os.close(other)
  with files.atomic_folder(tmp_path / "new"):
    pass
  assert not list((tmp_path / "new").iterdir())


def test_lowest_free_slot_is_reserved(tmp_path):
  reserved = [files.reserve_folder(tmp_path / "a", "run") for _ in range(3)]
  assert [path for path, _ in reserved] == [
    tmp_path / "a" / f"run-{number}" for number in range(3)
  ]
  reserved[1][1].close()
  path, again = files.reserve_folder(tmp_path / "a", "run")
  assert path.name == "run-1"
  for file in (reserved[0][1], reserved[2][1], again):
    file.close()
