"""Trains one model with full and one with half synchronisation, on text.

  python -m docs.demo
  python -m docs.demo --config=configs/caatnet/tiny.py:test
"""

import pathlib
import sys

from absl import flags

from launch import options
from parallel.base import files, heap

FLAGS = flags.FLAGS
FRACTIONS = (1.0, 0.5)


def main() -> None:
  from caatnet.config import experiments
  from caatnet.config.override import override
  from caatnet.show import pictures, results, tables
  from caatnet.train import loop

  workdir = files.parse_folder(FLAGS.workdir or "runs/demo", local=True)
  folders, rows = {}, []
  for p in FRACTIONS:
    config = override(FLAGS.config, f"sync.p={p}")
    experiment = experiments.build(config, options.mesh())
    options.resume_gc()  # after the first model
    label = f"p={p:g}"
    folders[label] = workdir / f"p{p:g}"
    print(f"\n{label}: {p:.0%} of the channels synchronised", flush=True)
    result = loop.train(experiment, folders[label], label=label)
    if not result.finished:
      sys.exit(result.exit_code)
    speed = result.units_per_second  # None if the run was finished before
    rows.append([
      f"{label}, {experiment.program.layout.tensor.size} tensor ranks",
      *(f"{result.measures[key]:.4f}" for key in ("loss", "bits_per_byte")),
      tables.communication_text(result.communication, "forward"),
      tables.communication_text(result.communication, "backward"),
      "-" if speed is None else f"{speed:,.0f}",
    ])
  data = experiment.data
  baselines = data.load(experiment.seed).baselines()
  measures = [label.replace(" per ", "/") for label in data.labels.values()]
  table = {
    "title": "validation loss, and what a device sends over the tensor axis "
    "per step",
    "columns": ["model", *measures, "forward", "backward", "tokens/s"],
    "rows": rows + [
      [*row, "", "", ""] for row in tables.measure_rows(baselines, data.labels)
    ],
  }
  tables.print_table(table["title"], table["columns"], table["rows"])
  if FLAGS.output:
    results.write(pathlib.Path(FLAGS.output), table)
  picture = workdir / "loss.png"
  references = {k: v["loss"] for k, v in baselines.items() if k == "bigram"}
  pictures.plot_losses(folders, picture, references, data.labels["loss"])
  half = folders["p=0.5"]
  print(f"loss curves  {picture}\ncheckpoints  {half}/checkpoints")
  print(
    f"evaluate     python -m launch.evaluate --workdir={half}\n"
    "resume       kill it half-way and run the same command again\n"
    "larger       python -m launch.train --config=configs/caatnet/130m.py "
    "--config.sync.p=0.5"
  )


if __name__ == "__main__":
  heap.keep_freed_memory()
  options.run(
    main, defaults={"config": "configs/caatnet/tiny.py", "cpu_devices": "8"},
    uses=("config", "workdir", "mesh", "cpu_devices", "output", "programs"),
    helps={"workdir": "Folder of both runs; runs/demo if unset."},
  )
