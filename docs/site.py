"""Builds the documents as a site: make docs, then open site/index.html.

The site mirrors the paths of the repository, so that links between documents
are valid in both. Files that documents link to, such as code and results, are
copied; a link to a file that does not exist is an error.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from docs.points import ROOT
from parallel.base import files

SOURCE = ROOT / "build" / "site"
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
_PAGES = (
  "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CLAIMS.md",
  "CONTRIBUTING.md", "docs/*.md", "log/*.md", "tests/recipes/*.md",
)


def pages(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """Returns the documents of the site, relative to the repository."""
  return sorted(
    path.relative_to(root) for pattern in _PAGES for path in root.glob(pattern)
  )


def linked_files(
  page: pathlib.Path, root: pathlib.Path = ROOT
) -> set[pathlib.Path]:
  """Returns the files that a page links to, relative to the repository.

  Raises:
    ValueError: A file does not exist, or is outside of the repository.
  """
  found = set()
  for name in _LINK.findall((root / page).read_text()):
    path = (root / page.parent / name).resolve()
    if not path.exists() or not path.is_relative_to(root):
      raise ValueError(f"{page} has a link to {name}, which does not exist")
    if path.is_file():
      found.add(path.relative_to(root))
  return found


def glossary(text: str) -> str:
  """Returns the page of terms, which are a section of ARCHITECTURE.md."""
  terms = text.partition("\n## Terms\n")[2].partition("\n## ")[0]
  return f"# Glossary\n{terms}"


def write(source: pathlib.Path, root: pathlib.Path = ROOT) -> None:
  """Writes the pages, and all files that they link to, to a new folder."""
  shutil.rmtree(source, ignore_errors=True)
  mine = pages(root)
  for path in {*mine, *(x for page in mine for x in linked_files(page, root))}:
    target = source / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / path, target)
  text = (root / "ARCHITECTURE.md").read_text()
  files.replace(source / "docs" / "glossary.md", glossary(text))


def main() -> int:
  """Builds the site, and returns mkdocs's exit code."""
  write(SOURCE)
  return subprocess.run(
    [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=ROOT,
    env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False,
  ).returncode


if __name__ == "__main__":
  sys.exit(main())
