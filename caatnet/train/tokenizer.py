"""The tokenizer of a run, which its folder keeps.

The files that decide tokens, stop tokens and chat template lie in
``WORKDIR/tokenizer``, with their identity in ``identity.json``. So a checkpoint
is read with the tokenizer that it was trained with, wherever that came from.
A run without this folder is one of bytes.
"""

from collections.abc import Mapping
import json
import os

from etils import epath
import jax

from caatnet.data.tokenizers import FILES, Bytes, LibraryTokenizer, Tokenizer
from caatnet.train import files, records

FOLDER = "tokenizer"
_IDENTITY = "identity.json"


def load(workdir: str | os.PathLike[str]) -> Tokenizer:
  """Reads the tokenizer of a run's folder, or of converted weights.

  Raises:
    FileNotFoundError: The folder holds no run.
    ValueError: The run has no text, or its tokenizer is damaged, gone, or
      another one than it was trained with.
  """
  workdir = files.folder(workdir)
  data = records.read_config(workdir).get("data", {})
  if data.get("name") != "text":
    raise ValueError(f"{workdir} holds a run without text: no tokenizer")
  folder = workdir / FOLDER
  if not (folder / FILES[0]).exists():
    if data["tokenizer"]:
      raise ValueError(
        f"{folder / FILES[0]} is gone, the tokenizer of the run there"
      )
    return Bytes()
  try:
    texts = {
      name: (folder / name).read_text()
      for name in FILES if (folder / name).exists()
    }
  except UnicodeDecodeError as error:
    raise ValueError(f"{folder} has a damaged file: {error}") from error
  recorded = _recorded(folder)
  name = recorded.get("name", workdir.name)
  found = LibraryTokenizer(name, texts, str(folder))
  if recorded and recorded["sha256"] != found.identity:
    raise ValueError(
      f"{folder} has changed: the run there has the tokenizer {name} "
      f"({_short(recorded['sha256'])}), its files are {_short(found.identity)}"
    )
  return found


def check(workdir: epath.Path, tokenizer: Tokenizer | None) -> None:
  """Refuses to go on with a run by another tokenizer.

  Args:
    workdir: The run's folder, which need not exist.
    tokenizer: What would make tokens now; None if the data are no text.

  Raises:
    ValueError: The run there has another tokenizer; the message has both.
  """
  if tokenizer is None or not (workdir / "config.json").exists():
    return
  stored = load(workdir)
  if stored.identity != tokenizer.identity:
    raise ValueError(
      f"{workdir} was trained with the tokenizer {described(stored)}, this is "
      f"{described(tokenizer)}; see config.data.tokenizer, or use another "
      "--workdir"
    )


def keep(workdir: epath.Path, tokenizer: Tokenizer | None) -> None:
  """Copies a tokenizer to the folder of a new run; one that is there stays.

  Args:
    workdir: The folder, in which ``config.json`` is still to be written: from
      then on the folder is a run's.
    tokenizer: The tokenizer; of bytes, or if it is None, nothing is kept.
  """
  if tokenizer is None or not tokenizer.files or jax.process_index():
    return
  if (workdir / "config.json").exists():
    return
  folder = workdir / FOLDER
  for name in FILES:  # of a run that was killed before it had its config
    (folder / name).unlink(missing_ok=True)
  write(folder, tokenizer.files)
  facts = {"name": tokenizer.name, "sha256": tokenizer.identity}
  records.write_json(folder / _IDENTITY, facts)


def write(folder: epath.Path, texts: Mapping[str, str]) -> None:
  """Writes a tokenizer's files, each as a whole, to a folder.

  Args:
    folder: The folder, which is made if it is missing.
    texts: The text of each file by its name, which is of `FILES`.

  Raises:
    ValueError: Another tokenizer is there, which runs may read.
  """
  main = FILES[0]
  path = folder / main
  if path.exists() and path.read_text() != texts[main]:
    raise ValueError(
      f"{path} is another tokenizer, which runs may read; remove it, or use "
      "another folder"
    )
  folder.mkdir(parents=True, exist_ok=True)
  for name in (*(name for name in texts if name != main), main):
    # The main one last: without it the folder is no tokenizer.
    files.replace(folder / name, texts[name])


def described(tokenizer: Tokenizer) -> str:
  """Returns a tokenizer's name and the head of its hash."""
  if isinstance(tokenizer, Bytes):
    return tokenizer.name
  return f"{tokenizer.name} ({_short(tokenizer.identity)})"


def _short(identity: str) -> str:
  return f"sha256 {identity[:16]}"


def _recorded(folder: epath.Path) -> dict[str, str]:
  """Reads what was recorded of a tokenizer; {} if nothing was."""
  path = folder / _IDENTITY
  try:
    found = json.loads(path.read_text()) if path.exists() else {}
    if found and not {"name", "sha256"} <= found.keys():
      raise ValueError("no name or sha256 in it")
  except (AttributeError, ValueError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  return found
