"""Updates the tables of README, CLAIMS and log/ from the files in results/.

  python -m launch.tables
  python -m launch.tables --check    # exits with 2 if a table differs

Markers in the documents enclose the tables; docs/tables.py defines them.
"""

from absl import flags

from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet import commands

  commands.require_checkout("tables")
  from caatnet.show import documents
  from caatnet.train import files
  from docs import tables

  stale = []
  for name in tables.DOCUMENTS:
    path = tables.ROOT / name
    try:
      text, changed = documents.rewritten(path.read_text(), tables.TABLES)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
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
