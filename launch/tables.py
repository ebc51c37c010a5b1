"""Updates the tables of README, CLAIMS and log/ from the files in results/.

  python -m launch.tables
  python -m launch.tables --check    # exits with 2 if a table differs

Markers in the documents enclose the tables; docs/tables.py defines them.
CLAIMS.md is written as a whole, from docs/claims/.
"""

from absl import flags

from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet import commands

  commands.require_checkout("tables")
  from caatnet.show import documents
  from parallel.base import files

  try:
    from docs import tables
  except ModuleNotFoundError as error:  # pydantic reads claims
    raise ValueError(
      f'the tables need {error.name}: pip install "caatnet[serve]"'
    ) from error
  stale = []
  for name in tables.DOCUMENTS:
    path = tables.ROOT / name
    try:
      old = path.read_text()
      source = tables.GENERATED.get(name, lambda old=old: old)()
      text, changed = documents.rewritten(source, tables.TABLES)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
    if name in tables.GENERATED:
      changed = ["text"] if text != old else []
    stale += [f"{table} in {name}" for table in changed]
    if changed and not FLAGS.check:
      files.replace(path, text)
  if stale and FLAGS.check:
    raise ValueError(
      f"tables that differ from results/: {', '.join(stale)}; update them "
      "with python -m launch.tables"
    )
  print("\n".join(stale) or "all tables match results/")


if __name__ == "__main__":
  options.run(main, uses=("check",), required=())
