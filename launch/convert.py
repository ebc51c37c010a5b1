r"""Converts Hugging Face checkpoints to runs, and runs to checkpoints.

  python -m launch.convert --from=Llama-3.1-8B --to=runs/llama --ranks=8
  python -m launch.convert --from=runs/llama --to=published --dtype=float16

A folder with checkpoints is a run; other folders are published models. The
run has the published sizes, and other keys from --config (--config.sync.p=0.5).
launch.generate reads it as --workdir, launch.train as --config.train.init_from.
"""

import functools
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("from", None, "Folder to read.")
flags.DEFINE_string("to", None, "Folder to write, which must not exist.")
flags.DEFINE_integer("ranks", None, "Tensor ranks of a run; 1 if unset.", 1)
flags.DEFINE_string("dtype", "",
  "Dtype of activations or published tensors; unset: unchanged.")


def main() -> None:
  from rich import console, progress

  from caatnet.config import experiments
  from caatnet.interop import huggingface
  from caatnet.interop import source as sources
  from caatnet.show import tables
  from parallel.base import files
  from parallel.base.checks import known

  source, to = (
    pathlib.Path(files.parse_folder(FLAGS[x].value, local=True, flag=f"--{x}"))
    for x in ("from", "to")
  )
  is_run = huggingface.is_run(source)
  huggingface.check_target(source, to)
  unused, what = ("ranks", "a run's") if is_run else ("step", "no run's")
  if FLAGS[unused].value is not None:
    raise ValueError(f"--{unused} has no effect: --from={source} is {what}")
  if is_run:
    options.refuse_config((), f"--from={source} is a run's")
    experiment = experiments.from_folder(source)
    total = huggingface.num_tensors(experiment)
    write = functools.partial(
      huggingface.write_published_model, experiment, source, to,
      step=FLAGS.step, dtype=FLAGS.dtype,
    )
  else:
    experiments.check(config := FLAGS.config)
    known("config.model.name=", config.model.name, ("transformer",))
    options.refuse_config(("model.", "parallel.tensor"), "see --ranks, --dtype")
    sizes = FLAGS.ranks or 1, FLAGS.dtype
    published = sources.open_published_model(source, *sizes)
    total = published.num_tensors
    config.name = to.name
    config.model.update(published.section)
    config.parallel.tensor = published.ranks
    for part, key in (config.data, "seq_len"), (config.inference, "context"):
      part[key] = min(part[key], published.num_positions)
    if published.tokenizer:
      config.data.tokenizer = str(source.absolute())
    experiment = experiments.build(config)
    write = functools.partial(huggingface.write_run, published, experiment, to)
  with progress.Progress(console=console.Console(stderr=True)) as bar:
    task = bar.add_task("tensors", total=total)
    made = write(advance=lambda: bar.advance(task))
  tables.print_table(f"{made.folder}", ["", "published", "run"], made.rows)


if __name__ == "__main__":
  options.run(
    main, uses=("config", "step"), required=("from", "to"),
    defaults={"config": "configs/caatnet/base.py"},
  )
