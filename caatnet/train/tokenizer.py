"""Storage of a run's tokenizer in its folder.

The files that define tokens, stop tokens and chat template are copied to
``WORKDIR/tokenizer``, with the tokenizer's identity in ``identity.json``. So a
checkpoint is always used with the tokenizer of its training, even if the
original files change. A run without this folder has the byte tokenizer.
"""

from collections.abc import Mapping
import json
import os

from etils import epath
import jax

from caatnet.data.tokenizers import (
  FILES,
  ByteTokenizer,
  LibraryTokenizer,
  Tokenizer,
)
from caatnet.train import records
from parallel.base import files

FOLDER = "tokenizer"
_IDENTITY_FILE = "identity.json"


def load(workdir: str | os.PathLike[str]) -> Tokenizer:
  """Returns the tokenizer of a run's folder, or of converted weights.

  Raises:
    FileNotFoundError: If the folder holds no run.
    ValueError: If the run has no text data, or its tokenizer is damaged,
      missing, or different from the one of its training.
  """
  workdir = files.parse_folder(workdir)
  data = records.read_config(workdir).get("data", {})
  if data.get("name") != "text":
    raise ValueError(
      f"{workdir} holds a run without text, which has no tokenizer"
    )
  folder = workdir / FOLDER
  if not (folder / FILES[0]).exists():
    if data["tokenizer"]:
      raise ValueError(
        f"{folder / FILES[0]} is missing; it holds the tokenizer of the run"
      )
    return ByteTokenizer()
  try:
    texts = {
      name: (folder / name).read_text()
      for name in FILES if (folder / name).exists()
    }
  except UnicodeDecodeError as error:
    raise ValueError(f"{folder} has a damaged file: {error}") from error
  recorded = _read_identity(folder)
  name = recorded.get("name", workdir.name)
  found = LibraryTokenizer(name, texts, str(folder))
  if recorded and recorded["sha256"] != found.identity:
    raise ValueError(
      f"{folder} has changed: the run there has the tokenizer {name} "
      f"({_format_hash(recorded['sha256'])}), its files are "
      f"{_format_hash(found.identity)}"
    )
  return found


def check(workdir: epath.Path, tokenizer: Tokenizer | None) -> None:
  """Checks that a resumed run has the same tokenizer.

  Args:
    workdir: The run's folder, which may not exist yet.
    tokenizer: The tokenizer of the config; None if the data are not text.

  Raises:
    ValueError: If the run there has another tokenizer; the message has both.
  """
  if tokenizer is None or not (workdir / "config.json").exists():
    return
  stored = load(workdir)
  if stored.identity != tokenizer.identity:
    raise ValueError(
      f"{workdir} was trained with the tokenizer {summary(stored)}, but the "
      f"config has {summary(tokenizer)}; see config.data.tokenizer, or use "
      "another --workdir"
    )


def copy_to_run(workdir: epath.Path, tokenizer: Tokenizer | None) -> None:
  """Copies a tokenizer to the folder of a new run.

  If ``config.json`` exists, the folder belongs to a run and is not changed.
  Therefore this must be called before ``config.json`` is written.

  Args:
    workdir: The folder.
    tokenizer: The tokenizer; nothing is written for None and for the byte
      tokenizer, which has no files.
  """
  if tokenizer is None or not tokenizer.files or jax.process_index():
    return
  if (workdir / "config.json").exists():
    return
  folder = workdir / FOLDER
  for name in FILES:  # left by a run that was killed before its config existed
    (folder / name).unlink(missing_ok=True)
  write(folder, tokenizer.files)
  facts = {"name": tokenizer.name, "sha256": tokenizer.identity}
  records.write_json(folder / _IDENTITY_FILE, facts)


def write(folder: epath.Path, texts: Mapping[str, str]) -> None:
  """Writes a tokenizer's files to a folder, each one atomically.

  Args:
    folder: The folder, which is created if it is missing.
    texts: The text of each file by its name, one of `FILES`.

  Raises:
    ValueError: If the folder has another tokenizer, which runs may be reading.
  """
  main = FILES[0]
  path = folder / main
  if path.exists() and path.read_text() != texts[main]:
    raise ValueError(
      f"{path} is another tokenizer, which other runs may use; remove it, or "
      "use another folder"
    )
  folder.mkdir(parents=True, exist_ok=True)
  for name in (*(name for name in texts if name != main), main):
    # The main file is last, since readers take a folder with it as complete.
    files.replace(folder / name, texts[name])


def summary(tokenizer: Tokenizer) -> str:
  """Returns a tokenizer's name and the first digits of its hash."""
  if isinstance(tokenizer, ByteTokenizer):
    return tokenizer.name
  return f"{tokenizer.name} ({_format_hash(tokenizer.identity)})"


def _format_hash(identity: str) -> str:
  return f"sha256 {identity[:16]}"


def _read_identity(folder: epath.Path) -> dict[str, str]:
  """Returns the recorded name and hash of a tokenizer; {} without a record."""
  path = folder / _IDENTITY_FILE
  try:
    found = json.loads(path.read_text()) if path.exists() else {}
    if found and not {"name", "sha256"} <= found.keys():
      raise ValueError("it has no name or sha256")
  except (AttributeError, RecursionError, ValueError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  return found
