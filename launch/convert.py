r"""Converts folders of Hugging Face to runs, and back.

  python -m launch.convert --from=Llama-3.1-8B --to=runs/llama --ranks=8
  python -m launch.convert --from=runs/llama --to=published --dtype=float16

A folder with checkpoints is a run's, any other a published one. A run's config
has the published sizes, and else what --config says, as in --config.sync.p=0.5.
launch.evaluate and launch.generate take its folder as --workdir, launch.train
starts from its parameters by --config.train.init_from.
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("from", None, "Folder to read.")
flags.DEFINE_string("to", None, "Folder to write, which must not exist.")
flags.DEFINE_integer("ranks", 1, "Tensor ranks of the run.", lower_bound=1)
flags.DEFINE_string(
  "dtype", "",
  "Of a run's activations, or of published tensors; as they were if unset.",
)


def main() -> None:
  from rich.progress import Progress

  from caatnet.build import experiments
  from caatnet.interop import huggingface
  from caatnet.interop.source import open_source
  from caatnet.show import tables

  source, to = (pathlib.Path(FLAGS[name].value) for name in ("from", "to"))
  with Progress() as bar:
    task = bar.add_task(f"{source} to {to}")

    def advance() -> None:
      bar.advance(task)

    if huggingface.is_run(source):
      experiment = experiments.from_folder(source)
      bar.update(task, total=huggingface.num_tensors(experiment))
      made = huggingface.write_published(
        experiment, source, to, step=FLAGS.step, dtype=FLAGS.dtype,
        advance=advance,
      )
    else:
      published = open_source(source, FLAGS.ranks, FLAGS.dtype)
      bar.update(task, total=published.num_tensors)
      config = FLAGS.config
      config.name = to.name
      config.model.update(published.section)
      config.parallel.tensor = published.ranks
      config.data.seq_len = min(config.data.seq_len, published.num_positions)
      made = huggingface.write_run(
        published, experiments.build(config), to, advance
      )
  before, after = made.cache_bytes
  tables.table(
    f"{made.folder}",
    ["", "published", "run"],
    [
      ["parameters", f"{made.parameters:,}", ""],
      ["bytes of tensors", f"{made.published_bytes:,}", ""],
      ["tensor ranks", "", str(made.ranks)],
      ["key/value heads", *map(str, made.kv_heads)],
      ["bytes of keys and values per token", f"{before:,}", f"{after:,}"],
    ],
  )


if __name__ == "__main__":
  options.run(
    main,
    uses=("config", "step"),
    required=("from", "to"),
    defaults={"config": "configs/caatnet/base.py"},
  )
