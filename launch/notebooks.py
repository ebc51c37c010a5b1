"""Executes the notebooks of colabs/ and stores their output.

  python -m launch.notebooks
  python -m launch.notebooks --only=routes
  python -m launch.notebooks --first_cell    # executes nothing
  python -m launch.notebooks --check    # exits with 2 if a notebook is stale

Needs the extra `colab`.
"""

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "Name of one notebook; all if unset.")
flags.DEFINE_bool(
  "first_cell", False, "Replace the first cell only, without execution."
)


def main() -> None:
  from caatnet import commands

  commands.require_checkout("notebooks")
  import nbformat

  from caatnet.show import notebooks

  folder = notebooks.ROOT / "colabs"
  paths = sorted(folder.glob(f"{FLAGS.only or '*'}.ipynb"))
  if not paths:
    names = ", ".join(sorted(path.stem for path in folder.glob("*.ipynb")))
    raise ValueError(f"--only={FLAGS.only}: the notebooks are {names}")
  if FLAGS.check:
    stale = [path.name for path in paths if notebooks.is_stale(path)]
    if stale:
      raise ValueError(
        f"cells changed since they were executed: {', '.join(stale)}; "
        "python -m launch.notebooks executes them"
      )
    return
  make = notebooks.with_first_cell if FLAGS.first_cell else notebooks.executed
  for path in paths:
    nbformat.write(make(path), path)
    print(path.name)


if __name__ == "__main__":
  options.run(main, uses=("check",), required=())
