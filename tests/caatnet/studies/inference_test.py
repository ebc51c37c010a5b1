"""The study of prefill and decode: formula, results and measured anchors."""

import copy

import pytest

from caatnet.models.lm.communication import decoding_reductions
from caatnet.models.transformer.config import TransformerConfig
from caatnet.show import render
from caatnet.studies.inference import measured, report, study
from configs.inference import decode
from parallel.plans.network import inference
from parallel.plans.network.inference import ModelStep
from parallel.tensor.partial_sync import PartialSync

CONFIG = decode.get_config().to_dict() | {"every": (2, 4)}


@pytest.fixture(scope="module")
def result():
  return study.run(CONFIG)


@pytest.mark.parametrize("model", study.MODELS)
@pytest.mark.parametrize("policy", [(1.0, 1), (0.29, 1), (1.0, 2), (0.5, 3)])
def test_messages_equal_those_of_the_model_formula(model, policy):
  sizes = study.MODELS[model]
  shares = study.reduced_fractions(sizes, policy)
  config = TransformerConfig(
    vocab_size=sizes.vocab_size, width=sizes.width,
    num_layers=sizes.num_layers, num_heads=sizes.num_heads,
    num_kv_heads=sizes.num_kv_heads, ffn_width=sizes.ffn_width,
    dtype="bfloat16",
    syncs=tuple(
      tuple(PartialSync(p) for p in shares[i : i + 2])
      for i in range(0, len(shares), 2)
    ),
  )
  expected = decoding_reductions(config, tokens=5 * 7)
  step = ModelStep(5, 7, 9)
  assert sorted(inference.all_reduce_bytes(sizes, step, shares)) == sorted(
    2 * rows * channels
    for (_, _, (rows, channels), _), count in expected.items()
    for _ in range(count)
  )


@pytest.mark.parametrize("sequences", [1, 32, 256, None])
def test_columns_of_7b_by_hand(result, sequences):
  """Eight H200: 989.5 TFLOP/s, 4.8 TB/s, and 450 GB/s over NVLink each way.

  None is the prefill of one prompt of 2048 tokens.
  """
  step = f"decode {sequences}" if sequences else "prefill 2048"
  (row,) = (
    r for r in result["rows"] if (r["model"], r["machine"], r["policy"]) == (
      "7b", "gpu:h200:1x8", "p=0.5"
    ) and r["step"] == step
  )
  peak, memory, links = 989.5e12, 4.8e12, 450e9
  context, layers, width = 2048, 32, 4096
  matrices = layers * (4 * width**2 + 3 * width * 11008) / 8  # of a device
  table = 32_000 * width / 8
  assert row["weights_gb"] * 1e9 == pytest.approx(2 * (matrices + 2 * table))
  cached = (sequences or 1) * context * layers * 2 * width / 8
  assert row["cache_gb"] * 1e9 == pytest.approx(2 * cached)
  tokens = sequences or 2048
  pairs = sequences * context if sequences else 2048 * 2049 / 2
  compute_s = (
    matrices * max(2 * tokens / peak, 2 / memory)
    + table * max(2 * (sequences or 1) / peak, 2 / memory)
    + max(4 * pairs * layers * width / 8 / peak, 2 * cached / memory)
  )
  assert row["compute_ms"] == pytest.approx(1e3 * compute_s, rel=1e-3)
  # The embedding sums all channels, two projections of each layer half.
  sent = 2 * tokens * (width + 2 * layers * width / 2)
  assert row["num_collectives"] == 1 + 2 * layers
  assert row["sent_mb"] * 1e6 == pytest.approx(sent)
  links_s = 2 * 7 / 8 * sent / links
  assert row["links_ms"] == pytest.approx(1e3 * links_s)
  assert row["without_ms"] == pytest.approx(1e3 * (compute_s + links_s), 1e-3)
  for found, overlapped, total in zip(
    row["collectives_ms"], row["overlapped_ms"], row["with_ms"], strict=True
  ):
    assert found >= row["links_ms"]
    assert total == pytest.approx(row["compute_ms"] + found)
    assert overlapped == pytest.approx(max(row["compute_ms"], found))


def test_ratios_of_measured_layers_are_to_the_roofline(result):
  table = report.layers(result)
  for shown, row in zip(table.rows, result["layers"], strict=True):
    whole = row["products_us"] + row["others_us"]
    assert shown["layer"] * row["roofline_us"] == pytest.approx(whole)
    rest = (shown["layer"] - shown["products"]) * row["roofline_us"]
    assert rest == pytest.approx(row["others_us"])


def test_savings_grow_as_less_is_shared(result):
  for row in result["rows"]:
    if row["policy"] == "p=1":
      assert row["saved_without"] == 0
      assert row["saved_with"] == [0, 0]
  steps = {}
  for row in result["rows"]:
    key = row["model"], row["machine"], row["step"]
    steps.setdefault(key, {})[row["policy"]] = row
  for rows in steps.values():
    for a, b in (("p=0.75", "p=0.5"), ("p=0.5", "p=0.25"),
                 ("1 in 2 layers", "1 in 4 layers")):
      assert rows[a]["saved_without"] <= rows[b]["saved_without"]
      assert rows[a]["with_ms"] >= rows[b]["with_ms"]


def test_fewer_collectives_of_equal_bytes_save_more(result):
  """Compares p = 0.5 in all layers with full syncs in every second layer."""
  rows = {
    (r["model"], r["machine"], r["step"], r["policy"]): r
    for r in result["rows"]
  }
  found = 0
  for (*key, policy), row in rows.items():
    if policy == "p=0.5" and "decode" in key[2]:
      fewer = rows[*key, "1 in 2 layers"]
      assert fewer["sent_mb"] == pytest.approx(row["sent_mb"])
      assert fewer["num_collectives"] < row["num_collectives"]
      for half, whole in zip(row["with_ms"], fewer["with_ms"], strict=True):
        assert whole < half
        found += 1
  assert found == 2 * 2 * 5 * 3


def test_threshold_is_the_start_of_lasting_savings():
  """Ignores savings before a dip below the threshold."""
  curve = {
    "model": "m", "machine": "n", "policy": "p", "most_sequences": 9,
    "sequences": [1, 2, 4, 8],
    "saved": [
      {"saved_without": a, "saved_with": [b, c]}
      for a, b, c in [(0.1, 0.0, 0.1), (0.0, 0.0, 0.1), (0.1, 0.04, 0.1),
                      (0.1, 0.04, 0.1)]
    ],
  }
  found = study._find_break_even(curve, 0.05)
  assert (found["without"], found["with"]) == (4, [None, 1])


def test_largest_batch_fits_in_memory():
  machine = inference.machine("gpu:a100:1x8")
  model = study.MODELS["70b"]
  most = study.most_sequences(model, machine, 4096)
  sizes = [
    sum(inference.memory_bytes(model, ModelStep(n, 1, 4096), 8).values())
    for n in (most, most + 1)
  ]
  assert sizes[0] <= 80e9 < sizes[1]


def test_no_measured_layer_is_faster_than_the_roofline(result):
  ratios = [r["products_us"] / r["roofline_us"] for r in result["layers"]]
  assert len(ratios) == 36
  assert min(ratios) > 1.2
  assert max(ratios) < 2
  assert {*measured.PRODUCT_COLUMNS} < {
    o.name for o in inference.operations(
      study.MODELS["70b"], ModelStep(1, 1, 1), 8
    )
  }


def test_slower_compute_leaves_less_to_save():
  config = copy.deepcopy(CONFIG) | {"models": ("70b",), "every": ()}
  rows = study.run(config)["rows"]
  slower = study.run(config | {"compute_factor": 2.0})["rows"]
  for row, other in zip(rows, slower, strict=True):
    assert other["compute_ms"] == pytest.approx(2 * row["compute_ms"])
    assert other["collectives_ms"] == row["collectives_ms"]
    assert other["saved_without"] <= row["saved_without"]


def test_tables_name_latency_and_machines(capsys):
  config = copy.deepcopy(CONFIG) | {"models": ("70b",), "every": ()}
  result = study.run(config | {"p": (1.0, 0.5)})
  render.show(report.report(result))
  printed = capsys.readouterr().out
  assert "161 all-reduces by their bytes alone; with the least" in (
    " ".join(printed.split())
  )
  assert "gpu:a100-pcie:1x8" in printed


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"models": ("8b",)}, "config.models: '8b' must be one of 7b, 70b"),
    ({"machines": ("gpu:h200:1x9",)}, "config.machines: .*from 2 to 8"),
    ({"batch": (10**5,)},
     r"config\.machines=.gpu:h200:1x8., 100000 .*config\.batch.*measured"),
  ],
)
def test_invalid_config_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    study.run(CONFIG | change)


@pytest.mark.parametrize("change", [
  {"context": 2**31 - 1}, {"p": (1.0,), "every": ()},
], ids=["no cache fits", "no policy but p = 1"])
def test_without_curves_there_is_no_picture(change):
  made = report.report(study.run(CONFIG | change))
  assert made.figure is None
  assert all(table.rows for table in made.tables)


def test_thresholds_are_by_bytes_and_by_the_least_and_greatest_latency(result):
  helps = [{"model": "m", "machine": "n", "policy": "p", "most_sequences": 9,
            "without": 1, "with": [2, None]}]
  table = next(
    table for table in report.report(result | {"helps": helps}).tables
    if "from how many sequences" in table.title
  )
  assert table.cells() == [["m", "n", "9", "1, 2, -"]]
