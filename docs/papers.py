"""Registry of papers, docs/papers.toml, and tables generated from it.

The tables of docs/papers.md, docs/strategies.md and of the papers in
docs/map.md come from the registry; those of directories and modules in
ARCHITECTURE.md and docs/map.md come from docstrings. `docs.tables` writes them.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import pathlib
import tomllib
from typing import Any

from caatnet.show.render import markdown_table
from docs import claims
from docs.claim_schema import Claim
from docs.points import ROOT

PATH = ROOT / "docs" / "papers.toml"
# The packages whose modules are in the map, in its order.
_PACKAGES = ("caatnet", "parallel", "launch", "configs")


@dataclasses.dataclass(frozen=True)
class Strategy:
  """Row of the table of strategies.

  Attributes:
    order: The row's position in the table, from 1.
    name: The strategy's name.
    paper: Its source.
    config: A config that runs it.
    file: The file that implements it.
    saves: Text on what it saves, such as bytes, if results/ has no figure.
    costs: Text on what it costs, such as loss, if results/ has no figure.
  """

  order: int
  name: str
  paper: str
  config: str
  file: str
  saves: str = "-"
  costs: str = "-"


@dataclasses.dataclass(frozen=True)
class Paper:
  """Paper: the files of its method, and its claims.

  Attributes:
    key: The entry's name in the registry.
    subject: Subject of the paper.
    reference: Publication.
    saves: Its savings in docs/papers.md; "" for papers that are not
      in that table.
    mechanism: Files that implement it.
    cost_model: Files that predict or count what it costs.
    studies: The folders of the studies that compare it.
    configs: Configs that run it.
    notebooks: Notebooks that show it.
    claims: Its claims, from docs/claims/.
    strategies: Its rows in the table of strategies.
  """

  key: str
  subject: str
  reference: str
  saves: str = ""
  mechanism: tuple[str, ...] = ()
  cost_model: tuple[str, ...] = ()
  studies: tuple[str, ...] = ()
  configs: tuple[str, ...] = ()
  notebooks: tuple[str, ...] = ()
  claims: tuple[Claim, ...] = ()
  strategies: tuple[Strategy, ...] = ()

  @property
  def paths(self) -> tuple[str, ...]:
    """All files and folders that the entry names."""
    named = (s.config for s in self.strategies)
    files = (s.file for s in self.strategies)
    return (
      *self.mechanism, *self.cost_model, *self.studies, *self.configs,
      *self.notebooks, *named, *files,
    )


def load(path: pathlib.Path = PATH) -> list[Paper]:
  """Reads the registry.

  Raises:
    ValueError: An entry has an unknown key, or lacks one.
  """
  entries = tomllib.loads(path.read_text())["papers"]
  known = claims.load()
  return [
    _paper(key, entry, known.get(key, ())) for key, entry in entries.items()
  ]


def _paper(
  key: str, entry: Mapping[str, Any], its_claims: Sequence[Claim]
) -> Paper:
  fields = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in entry.items()
  }
  try:
    fields["strategies"] = tuple(
      Strategy(**row) for row in entry.get("strategies", ())
    )
    return Paper(key, **fields, claims=tuple(its_claims))
  except TypeError as error:
    raise ValueError(f"{PATH.name}, papers.{key}: {error}") from error


def strategy_table(figures: Mapping[str, tuple[str, str]]) -> str:
  """Returns the table of strategies.

  Args:
    figures: Name of a strategy -> savings and costs, for strategies with
      figures in results/.

  Raises:
    ValueError: A key of ``figures`` is not the name of a strategy.
  """
  rows = sorted(
    (s for paper in load() for s in paper.strategies), key=lambda s: s.order
  )
  unknown = set(figures) - {s.name for s in rows}
  if unknown:
    raise ValueError(
      f"the table of strategies must have rows for {', '.join(sorted(unknown))}"
    )
  return markdown_table(
    ["strategy", "paper", "what it saves", "what it costs here", "config",
     "file"],
    [
      [
        s.name, s.paper, *figures.get(s.name, (s.saves, s.costs)),
        f"`{s.config}`", f"`{s.file}`",
      ]
      for s in rows
    ],
    is_markdown=True,
  )


def verdict_table(_: str = "") -> str:
  """Returns the table of papers with savings and our verdicts."""
  rows = []
  for paper in load():
    if paper.saves:
      rows.append([
        f"{paper.subject.split(':')[0]} ({paper.reference})", paper.saves,
        claims.format_verdict_counts(paper.claims),
        f"`{paper.configs[0]}`",
      ])
  return markdown_table(
    ["paper", "what it saves", "our verdicts on its claims", "config"], rows,
    is_markdown=True,
  )


def paper_table(_: str = "") -> str:
  """Returns the table of papers: the files of each."""
  return markdown_table(
    ["paper", "mechanism", "cost model", "studies", "configs", "notebooks",
     "claims"],
    [
      [
        f"{p.subject} ({p.reference})" if p.reference != "-" else p.subject,
        *(
          ", ".join(f"`{path}`" for path in paths) or "-"
          for paths in (
            p.mechanism, p.cost_model, p.studies, p.configs, p.notebooks
          )
        ),
        ", ".join(c.number for c in p.claims)
        + f" ({claims.format_verdict_counts(p.claims)})" if p.claims else "-",
      ]
      for p in load()
    ],
    is_markdown=True,
  )


def module_map(_: str = "") -> str:
  """Returns the map of the code: each module with its docstring's first line.

  Modules are listed by directory, directories in alphabetical order.
  """
  lines = []
  for package in _PACKAGES:
    folders = sorted({path.parent for path in _sources(package)})
    for folder in folders:
      rows = [
        f"- `{path.name}`: {_summary(path)}\n"
        for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"
      ]
      if rows:
        name = folder.relative_to(ROOT).as_posix()
        lines += [f"\n### `{name}/`\n\n", *rows]
  return "".join(lines).lstrip("\n")


def directory_table(_: str = "") -> str:
  """Returns the files of `parallel` and `caatnet`, then their directories."""
  rows = []
  for package in ("parallel", "caatnet"):
    here = ROOT / package
    files = [p for p in sorted(here.glob("*.py")) if p.stem != "__init__"]
    folders = [p.parent for p in sorted(here.glob("*/__init__.py"))]
    for path in (*files, *folders):
      source = path if path.is_file() else path / "__init__.py"
      name = path.relative_to(ROOT).as_posix() + "/" * path.is_dir()
      rows.append([f"`{name}`", _summary(source)])
  return markdown_table(["path", "contents"], rows, is_markdown=True)


def _sources(package: str) -> Iterator[pathlib.Path]:
  return (
    path for path in (ROOT / package).rglob("*.py")
    if path.name != "__init__.py"
  )


def _summary(path: pathlib.Path) -> str:
  """Returns the first paragraph of a module's docstring, on one line."""
  text = ast.get_docstring(ast.parse(path.read_text())) or ""
  return " ".join(text.split("\n\n")[0].split())
