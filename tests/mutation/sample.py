"""Seeded samples of mutants, per directory."""

from collections.abc import Collection, Iterator, Sequence
import math
import pathlib
import random
from typing import Any

from tests.mutation.candidates import Mutant, candidates, is_distinct, read

TOPS = ("parallel", "caatnet")


def directory_of(file: str) -> str:
  """Directory that a file counts for, e.g. parallel/outer or parallel."""
  parts = pathlib.PurePosixPath(file).parts
  return "/".join(parts[: min(2, len(parts) - 1)])


def sources(root: pathlib.Path) -> dict[str, list[str]]:
  """Files with code of each directory, sorted."""
  found: dict[str, list[str]] = {}
  for top in TOPS:
    for path in sorted((root / top).rglob("*.py")):
      file = path.relative_to(root).as_posix()
      found.setdefault(directory_of(file), []).append(file)
  return found


def _pick(rng: random.Random, tree: dict, weighted: int) -> Any:
  """Draws a leaf without replacement, level by level.

  The first `weighted` levels draw a branch with the square root of its number
  of leaves, so that long files and functions come up more often than short
  ones, but not in proportion. Lower levels are uniform.
  """
  names = sorted(tree)
  weights = [
    math.sqrt(_size(tree[n])) if weighted > 0 else 1.0 for n in names
  ]
  name, = rng.choices(names, weights)
  branch = tree[name]
  if isinstance(branch, list):
    leaf = branch.pop(rng.randrange(len(branch)))
  else:
    leaf = _pick(rng, branch, weighted - 1)
  if not branch:
    del tree[name]
  return leaf


def _size(tree: dict | list) -> int:
  return len(tree) if isinstance(tree, list) else sum(map(_size, tree.values()))


def draw(
  mutants: Sequence[Mutant], seed: int, directory: str
) -> Iterator[Mutant]:
  """All mutants in a random order in which files and functions take turns."""
  rng = random.Random(f"{seed} {directory}")
  tree: dict = {}
  for m in mutants:
    of_function = tree.setdefault(m.file, {}).setdefault(m.function, {})
    of_function.setdefault(m.operator, []).append(m)
  while tree:
    yield _pick(rng, tree, 2)


def sample(
  root: pathlib.Path, directory: str, files: Sequence[str], num: int,
  seed: int, skipped: Collection[tuple] = (),
) -> list[Mutant]:
  """The first mutants of a random order that change what is compiled.

  Args:
    root: Root of the repository.
    directory: Directory of the files; part of the seed.
    files: Paths from the root.
    num: Number of mutants, fewer if there are not as many.
    seed: Seed of the order.
    skipped: Identities of mutants that are known to be equivalent.
  """
  texts = {file: read(root, file) for file in files}
  every = [m for file in files for m in candidates(texts[file], file)]
  found: list[Mutant] = []
  for m in draw(every, seed, directory):
    if len(found) == num:
      break
    if m.identity not in skipped and is_distinct(texts[m.file], m):
      found.append(m)
  return found


def split(num: int, directories: Sequence[str], seed: int) -> dict[str, int]:
  """Number of mutants per directory, as equal as possible."""
  base, rest = divmod(num, len(directories))
  order = random.Random(seed).sample(directories, len(directories))
  return {d: base + (order.index(d) < rest) for d in directories}
