"""Comparison of measured layers of Llama-2-70B with the roofline.

``layers.csv`` has median times in us of the operations of one layer by number
of tokens, on one of 4 or 8 tensor ranks. Attention between queries and cache
and the all-reduces are not included. The file is a sample of the profiles
of Microsoft's Vidur (MIT licence).
"""

import csv
import pathlib
from typing import Any

from parallel.plans.hardware.devices import DEVICES
from parallel.plans.network.inference import ModelStep, operations
from parallel.plans.workload import Transformer

SOURCE = (
  "microsoft/vidur (MIT licence), data/profiling/compute/*/meta-llama/"
  "Llama-2-70b-hf/mlp.csv, few of its sizes"
)
_SAMPLE = pathlib.Path(__file__).with_name("layers.csv")
# Columns of the sample: PRODUCTS by the names of the matrix products in
# `parallel.plans.network.inference`; the roofline ignores the OTHERS.
PRODUCT_COLUMNS = {
  "qkv": "attn_pre_proj", "out": "attn_post_proj",
  "gate and up": "mlp_up_proj", "down": "mlp_down_proj",
}
OTHER_COLUMNS = (
  "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add"
)


def compare_with_roofline(model: Transformer) -> list[dict[str, Any]]:
  """Returns measured and computed microseconds of a layer without attention.

  Args:
    model: Sizes of Llama-2-70B.

  Returns:
    A row for each GPU, number of ranks and number of tokens.
  """
  with _SAMPLE.open(newline="") as file:
    rows = list(csv.DictReader(x for x in file if not x.startswith("#")))
  found = []
  for row in rows:
    ranks, tokens = int(row["num_ranks"]), int(row["tokens"])
    device = DEVICES[row["gpu"]]
    # Only products are compared, so the context does not matter.
    step = ModelStep(sequences=tokens, tokens=1, context=1)
    found.append({
      "gpu": row["gpu"],
      "num_ranks": ranks,
      "tokens": tokens,
      "products_us": sum(float(row[c]) for c in PRODUCT_COLUMNS.values()),
      "others_us": sum(float(row[c]) for c in OTHER_COLUMNS),
      "roofline_us": 1e6 * sum(
        o.seconds(device, model.dtype)
        for o in operations(model, step, ranks)
        if o.name in PRODUCT_COLUMNS
      ),
    })
  return found
