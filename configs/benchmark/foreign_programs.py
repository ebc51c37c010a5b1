r"""Collectives of programs of other projects, compared with closed forms.

  python -m launch.benchmark --config=configs/benchmark/foreign_programs.py \
    --config.benchmark.python=python3.12 --output=results/foreign_programs.json

  python -m launch.benchmark --config=configs/benchmark/foreign_programs.py \
    --config.benchmark.targets="('tpu:v5p:2x2x2',)" \
    --config.benchmark.python=python3.12 \
    --output=results/foreign_programs_v5p.json

  python -m launch.benchmark --config=configs/benchmark/foreign_programs.py \
    --config.benchmark.projects="('levanter','maxtext')" \
    --config.benchmark.python=python3.12 \
    --output=results/foreign_frameworks.json

`results/foreign_programs_{512,v5p_512,h200}.json` are of `cpu:512`,
`tpu:v5p:8x8x8` and `gpu:h200:1x8`.

The projects are installed from the package registry into four environments,
as some need other packages; later runs use them again. Other targets have
further environments, of 1.5 GB (TPU) and 5.7 GB (GPU), but need no such device.
The code is compiled there, unchanged, for eight virtual CPU devices or another
target, and read here: axes, kinds and bytes must be those of closed forms
written by hand. Most steps around layers, models and functions of the projects
are ours; those of Keras, Brax, Levanter and MaxText are their own. In each
program for eight CPU devices, faults are planted, and the reading must name
their source lines. The steps are not executed.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.name = "foreign_programs"
  config.benchmark = defaults("benchmark", "foreign_programs")
  return config
