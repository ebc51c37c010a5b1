"""Benchmark of lockstep pipelines: the compared forms compute one step."""

from caatnet.benchmarks.training import lockstep
from configs.benchmark import lockstep as configs
from tests.caatnet.benchmarks.printed import rows_of


def test_forms_agree_and_their_work_is_that_of_their_ticks(capsys):
  """`run` refuses forms that differ; work is in forwards of one stage."""
  config = configs.get_config("test")
  config.benchmark.forms = ("autodiff", "masked", "1f1b +", "zb_h1 +")
  stages, m = config.benchmark.stages, config.benchmark.microbatches
  rows = {r["form"]: r for r in lockstep.run(config)["rows"]}
  work = {form: (r["flops"], r["critical_flops"]) for form, r in rows.items()}
  ticks = m + stages - 1
  # Forward, recomputed forward, and both halves of a backward.
  assert work["autodiff"] == (4 * ticks, 4 * ticks)
  longer = m + 2 * (stages - 1)
  assert work["masked"] == (4 * longer, 4 * longer)
  assert work["1f1b +"][0] == work["zb_h1 +"][0] == 3 * m
  # Actions take equal time, so a step is its ticks, 3 m of which are work.
  assert work["zb_h1 +"][1] == 3 * m + stages - 1
  assert work["1f1b +"][1] > work["zb_h1 +"][1]
  # Relative to the first form.
  assert rows["autodiff"]["relative"] == 1
  assert rows_of(capsys.readouterr().out) == [
    [form, f"{r['relative']:.2f}", f"{r['flops']:.1f}",
     f"{r['critical_flops']:.1f}", f"{r['temporaries'] / 1e6:.1f}"]
    for form, r in rows.items()
  ]
