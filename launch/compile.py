r"""Compiles a step for a machine that is not present, and analyses it.

  python -m launch.compile --config=configs/caatnet/7b.py \
    --target=tpu:v5p:4x4x4 --mesh=data:8,tensor:8
  python -m launch.compile --config=configs/caatnet/tiny.py --target=cpu:8 \
    --compare="config.sync.p=0.5"
  python -m launch.compile --config=configs/caatnet/7b.py --phase=decode \
    --target=gpu:h200:1x8 --mesh=tensor:8 --config.parallel.data=1 \
    --config.inference.batch=32 --config.inference.context=2048

Targets are tpu:GENERATION:TOPOLOGY (v4, v5e, v5p, v6e, tpu7x; extra `tpu`),
gpu:NAME:NODESxGPUS (a100, a100-pcie, h100, h200, b200; extra `cuda`) and cpu:N.
Logical sizes are those of config.parallel. Prefill is a chunk of one prompt.
"""

import functools
import re

from absl import flags

from launch import options

FLAGS = flags.FLAGS
_PHASES = ["train", "prefill", "decode"]
flags.DEFINE_enum("phase", "train", _PHASES, "Kind of step to compile.")
flags.DEFINE_bool("default_options", False, "Omit all XLA options.")


def main() -> None:
  for name in ("step", "cluster"):
    if FLAGS.phase != "train" and FLAGS[name].present:
      raise ValueError(f"--{name} has no effect on --phase={FLAGS.phase}")
  import jax
  from rich.console import Console
  from rich.text import Text

  jax.config.update("jax_platforms", "cpu")  # local accelerators are not used
  kind, _, count = FLAGS.target.partition(":")
  if kind == "cpu" and count.isdecimal():
    jax.config.update("jax_num_cpu_devices", int(count))

  from caatnet.config import experiments, inference
  from caatnet.config.override import override
  from caatnet.inspection import decoding, report, study
  from caatnet.show import render
  from parallel.ledger import targets
  from parallel.plans.hardware import cluster_files

  target, results, programs = targets.resolve(FLAGS.target), {}, {}
  if FLAGS.cluster:
    measured = cluster_files.cluster(FLAGS.cluster)
    target = targets.with_measured_links(target, measured)
  for label in dict.fromkeys(["", FLAGS.compare]):
    text = re.sub(r"(^|\s)(--)?config\.", r"\1", label)
    config, where = override(FLAGS.config, text), list(target.devices)
    if FLAGS.phase == "train":
      run = experiments.build(config, options.mesh(), where)
      programs |= study.programs_of_run(label or "base", run, FLAGS.step)
    else:
      built = inference.build(config, options.mesh(), where, target.name)
      step = decoding.step_of(FLAGS.phase, built)
      programs[label or "base"] = functools.partial(decoding.analyse, step)
  for name, analyse in programs.items():
    with Console(stderr=True).status(Text(f"compiling {name}")):
      results[name] = analyse(target, {} if FLAGS.default_options else None)
  render.present(
    report.report(results), results, FLAGS.json, FLAGS.output, FLAGS.plot,
    FLAGS.report, saved={"programs": results},
  )


if __name__ == "__main__":
  options.run(
    main, required=("config", "target"),
    uses=("cluster", "compare", "config", "json", "mesh", "output", "plot",
          "report", "step", "target"),
    helps={"cluster": "File of measured rates, whose residuals give intervals.",
           "step": "Step to compile, from 0; unset: all programs of a round."},
  )
