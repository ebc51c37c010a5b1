r"""Compiles a training step for a machine that is not here, and reads it.

  python -m launch.compile --config=configs/caatnet/7b.py \
    --target=tpu:v5p:4x4x4 --mesh=data:8,tensor:8
  python -m launch.compile --config=configs/caatnet/tiny.py --target=cpu:8 \
    --compare="config.sync.p=0.5"
  python -m launch.compile --config=configs/diloco/streaming.py --target=cpu:8

Targets are tpu:GENERATION:TOPOLOGY (v4, v5e, v5p, v6e, tpu7x; needs the extra
`tpu`), gpu:NAME:NODESxGPUS (a100, a100-pcie, h100, h200, b200; needs the extra
`cuda`) and cpu:N. Logical sizes are those of config.parallel.
"""

import json
import pathlib
import re

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("target", None, "What to compile for; see above.")
flags.DEFINE_string(
  "compare", "", 'A second program, as overrides: "config.sync.p=0.5 ...".'
)
flags.DEFINE_bool(
  "default_options", False, "Compile without the target's compiler options."
)


def main() -> None:
  import jax
  from rich.console import Console

  jax.config.update("jax_platforms", "cpu")  # the machine itself stays unused
  kind, _, count = FLAGS.target.partition(":")
  if kind == "cpu" and count.isdigit():
    jax.config.update("jax_num_cpu_devices", int(count))

  from caatnet.build import experiments
  from caatnet.build.override import override
  from caatnet.show import results as results_files
  from caatnet.studies.compilation import pictures, study, tables
  from parallel.xla import targets

  target = targets.resolve(FLAGS.target)
  results = {}
  for overrides in dict.fromkeys(["", FLAGS.compare]):
    label = overrides or "base"
    config = override(
      FLAGS.config, re.sub(r"(^|\s)(--)?config\.", r"\1", overrides)
    )
    experiment = experiments.build(config, options.mesh(), list(target.devices))
    steps = [FLAGS.step]
    if FLAGS.step is None:
      steps = study.steps_of_programs(experiment.outer)
    for step in steps:
      name = label if len(steps) == 1 else f"{label}, step {step}"
      with Console(stderr=True).status(f"compiling {name} for {target.name}"):
        results[name] = study.analyse(
          experiment, target, {} if FLAGS.default_options else None, step
        )
  if FLAGS.json:
    print(json.dumps(results))
  else:
    tables.show(results)
  if FLAGS.output:
    results_files.write(pathlib.Path(FLAGS.output), {"programs": results})
  if FLAGS.plot:
    pictures.plot(results, pathlib.Path(FLAGS.plot))


if __name__ == "__main__":
  options.run(
    main,
    uses=("config", "mesh", "json", "plot", "step", "output"),
    required=("config", "target"),
  )
