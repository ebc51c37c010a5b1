"""The demo: the same model fully and half synchronised, on real text.

  python -m launch.demo
  python -m launch.demo --config=configs/caatnet/tiny.py:test
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
FRACTIONS = (1.0, 0.5)


def main() -> None:
  from caatnet import build, plots, report
  from caatnet.data.baselines import text_baselines
  from caatnet.train import loop

  workdir = pathlib.Path(FLAGS.workdir or "runs/demo")
  folders, rows = {}, []
  for p in FRACTIONS:
    config = build.override(FLAGS.config, f"model.p={p}")
    experiment = build.build(config, options.mesh())
    label = f"p={p:g}"
    folders[label] = workdir / f"p{p:g}"
    print(f"\n{label}: {p:.0%} of the channels synchronised", flush=True)
    result = loop.train(experiment, folders[label], label=label)
    if not result.finished:
      return
    rows.append(
      [
        f"{label}, {experiment.program.tensor.size} tensor ranks",
        f"{result.evaluation.loss:.4f}",
        f"{result.evaluation.bits_per_byte:.4f}",
        report.communication_text(result.communication, "forward"),
        report.communication_text(result.communication, "backward"),
        f"{result.tokens_per_second:,.0f}",
      ]
    )
  corpus = experiment.corpus()
  baselines = report.baseline_losses(
    text_baselines(corpus.train, experiment.validation(corpus))
  )
  report.table(
    "validation loss, and what a device sends over the tensor axis per step",
    ["model", "nats/byte", "bits/byte", "forward", "backward", "tokens/s"],
    rows + report.loss_rows(baselines, 6),
  )
  picture = workdir / "loss.png"
  references = {k: v for k, v in baselines.items() if k == "bigram"}
  plots.plot_losses(folders, picture, references)
  half = folders["p=0.5"]
  print(f"loss curves  {picture}\ncheckpoints  {half}/checkpoints")
  print(f"evaluate     python -m launch.evaluate --workdir={half}")
  print("resume       kill it half-way and run the same command again")
  print(
    "larger       python -m launch.train --config=configs/caatnet/130m.py "
    "--config.model.p=0.5"
  )


if __name__ == "__main__":
  options.run(
    main,
    defaults={
      "config": "configs/caatnet/tiny.py",
      "cpu_devices": "8",
    },
  )
