"""Predicted rounds in a 5G cell with coded, sparse, late or streamed updates.

Predicts times and bytes; log/2026-11-27-federated-cell.md compares accuracy.
"""

from collections.abc import Mapping
import statistics
from typing import Any

from caatnet.federated import predict
from caatnet.federated import streamed as streams
from caatnet.federated.predict import MessageSizes
from caatnet.studies.federated import rounds
from parallel.plans.hardware import client_links as records

# Sizes of `caatnet.federated.vector_codec`: elements per float32 scale; of
# "sparse", elements per chunk and the number of them that are kept.
_BLOCK, _CHUNK, _KEPT_ELEMENTS = 256, 4096, 64


def coded_bytes(name: str, n: int) -> int:
  """Returns the bytes of a coded vector, as `vector_codec` makes it.

  Args:
    name: "none", "int8", "int4", "e3m0" or "sparse".
    n: Number of elements.
  """
  if name == "none":
    return 4 * n
  if name == "sparse":
    return -(-n // _CHUNK) * (2 * _KEPT_ELEMENTS + _KEPT_ELEMENTS // 4 + 8)
  blocks = -(-n // _BLOCK)
  return blocks * ((_BLOCK if name == "int8" else _BLOCK // 2) + 4)


def compare_variants(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns times and bytes of a round for each codec and straggler policy.

  Args:
    config: Config like configs/federated/links.py, as nested dicts.
  """
  n, num = config["published_parameters"], max(config["clients"])
  found = []
  for name, up, down in (
    ("float32", "none", "none"), ("int8 uplink", "int8", "none"),
    ("4-bit uplink", "int4", "none"), ("sparse uplink", "sparse", "none"),
    ("4-bit uplink and downlink", "int4", "int4"),
    ("sparse uplink, 4-bit downlink", "sparse", "int4"),
  ):
    sizes = MessageSizes(
      coded_bytes(down, n), coded_bytes(up, n),
      None if down == "none" else 4 * n,
    )
    for stragglers in ("wait", "late"):
      found.append(_simulate_codec(config, name, sizes, stragglers, num))
  base = found[0]["round_s"]
  for name, bits in (("float32", "none"), ("4-bit", "int4")):
    size = coded_bytes(bits, n)
    for fragments in config["fragments"]:
      found.append({
        "variant": f"{name}, {fragments} streamed fragments",
        "stragglers": "wait", "bytes_up": size, "bytes_down": size,
        "round_s": streamed_round_s(config, num, size, fragments),
        "merged": num,
      })
  return [row | {"relative": row["round_s"] / base} for row in found]


def _simulate_codec(
  config: Mapping[str, Any], name: str, sizes: MessageSizes, stragglers: str,
  num: int
) -> dict[str, Any]:
  """Returns the mean time and the bytes of a round with one slow client.

  `name` labels the row, `sizes` are the bytes of models and updates,
  `stragglers` is the policy for late clients, `num` the number of clients. One
  client computes ``config.slow`` times as long as usual. The deadline for
  late updates is 1% more than a round without a slow client.
  """
  links = records.assign_links((config["cell"],), num)
  times = rounds.client_compute_times(config, num)
  usual = predict.simulate_run(
    rounds.make_server_rules(num, rounds=2), links, sizes, times,
    config["fixed_s"]
  )
  times[0] = {
    key: value * (1 if key == "t_a" else config["slow"])
    for key, value in times[0].items()
  }
  run = predict.simulate_run(
    rounds.make_server_rules(
      num, rounds=16, stragglers=stragglers,
      deadline_s=1.01 * rounds.round_end_events(usual)[-1].duration_s,
    ), links, sizes, times, config["fixed_s"],
  )
  # Leaves out eight rounds, which the uncoded first model delays.
  ends = rounds.round_end_events(run)[8:]
  rows = [row for row in run.rows if row["round"] >= 8]
  return {
    "variant": name, "stragglers": stragglers,
    "bytes_up": statistics.median(row["bytes_up"] for row in rows),
    "bytes_down": statistics.median(row["bytes_down"] for row in rows),
    "round_s": statistics.mean(end.duration_s for end in ends),
    "merged": statistics.mean(len(end.merged) for end in ends),
  }


def streamed_round_s(
  config: Mapping[str, Any], num: int, size: int, fragments: int
) -> float:
  """Returns the seconds of a round in which sending overlaps with compute.

  Args:
    config: Config like configs/federated/links.py, as nested dicts.
    num: Number of clients; one computes ``config.slow`` times as long.
    size: Bytes of all fragments of a model together, in each direction.
    fragments: Number of fragments of a model, streamed separately.
  """
  num_rounds, part = config["streamed_rounds"], size // fragments
  ends = streams.compute_merge_times_s(
    records.assign_links((config["cell"],), num),
    MessageSizes(part, part, 4 * config["published_parameters"]),
    [
      (t["t_v"] + t["t_tr"] + t["t_te"]) / fragments
      * (1 if k else config["slow"])
      for k, t in enumerate(rounds.client_compute_times(config, num))
    ],
    fragments, num_rounds, config["fixed_s"],
    config["aggregation_s"] / fragments,
  )
  # Ignores the first round, in which the pipeline of transfers fills.
  return (ends[-1] - ends[fragments - 1]) / (num_rounds - 1)
