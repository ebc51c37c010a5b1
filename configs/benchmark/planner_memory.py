r"""The planner's memory estimates, compared with compiled programs.

  python -m launch.benchmark --config=configs/benchmark/planner_memory.py

Training steps of random transformers are compiled for eight chips, one process
per program; for half of them the estimate is within 15% of a device's memory,
where errors change decisions. A row is added to `config.benchmark.results` as
soon as its program is compiled, and existing rows are not repeated, so the same
command resumes a stopped benchmark. Every other program is used for the fit,
the others are held out. Needs the extra `tpu`; a program takes a minute. With
the extra `cuda` it takes a quarter of a minute:

  JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m launch.benchmark \
    --config=configs/benchmark/planner_memory.py \
    --config.benchmark.target=gpu:h200:1x8 \
    --config.benchmark.results=results/planner_memory_h200.json

With `answers`, programs are the planner's answers to random problems with small
models, whose fit also uses the random programs:

  JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m launch.benchmark \
    --config=configs/benchmark/planner_memory.py \
    --config.benchmark.target=gpu:h200:1x8 \
    --config.benchmark.num_programs=60 --config.benchmark.answers=True \
    --config.benchmark.also=results/planner_memory_h200.json \
    --config.benchmark.results=results/planner_memory_answers_h200.json

60 other answers are held out (`--config.benchmark.seed=1`,
results/planner_memory_held_out_h200.json). The command of the random programs
with `--config.benchmark.also=results/planner_memory_answers_h200.json` prints
the fit that the planner uses. Files of a v5p have the same names with v5p; half
of its answers compile within ten minutes, most of these within two.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  """Returns the benchmark."""
  config = ml_collections.ConfigDict()
  config.name = "planner_memory"
  config.benchmark = defaults("benchmark", "planner_memory")
  return config
