"""Prints tables of the study of serving."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables


def show(result: Mapping[str, Any]) -> None:
  """Prints a simulated run beside the log of a real one.

  Args:
    result: What `caatnet.studies.serving.study.run` returned.
  """
  counts = result["counts"]
  tables.table(
    f"{result['num_requests']} requests: simulated, and in the log of vLLM "
    "0.19.0 on an RTX 4090 (s)\nno constant is fitted to the log; linear "
    f"percentiles; {counts['steps']:,} steps, {counts['preemptions']} "
    f"preemptions,\n{counts['found_pages']:,} pages found, "
    f"{counts['shared_pages']:,} of them when a request was first admitted",
    ["", "simulated", "log", "error", "suspected rule"],
    [
      [r["name"], f"{r['ours_s']:.4f}", f"{r['log_s']:.4f}",
       f"{r['error']:+.2%}", r["suspected"]]
      for r in result["rows"]
    ],
  )
  if result["sensitivity"]:
    names = [r["name"] for r in result["rows"]]
    tables.table(
      "errors if one thing is changed (%)",
      ["changed", *(name.replace(" ", "\n") for name in names)],
      [
        [row["changed"], *(f"{100 * row['errors'][n]:+.1f}" for n in names)]
        for row in result["sensitivity"]
      ],
    )
  print(f"source of log and operations: {result['source']}")
