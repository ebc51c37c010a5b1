"""Published figures of Samba-CoE, computed from rates and capacities.

A request takes an execution time t and, if its expert is not on the devices,
the time of a switch:

    seconds = (bytes / rate of the switch, if the expert is absent) + t.

Switch times and numbers of machines follow from rates and capacities alone. The
ratios of whole requests and of fused programs also depend on execution times,
of which several are tried. The one that gives a published ratio is computed.

Source: SN40L and Composition of Experts (arXiv 2405.07518).
"""

from collections.abc import Mapping
from typing import Any

from parallel.plans.hardware.nodes import NODES, Node

BASE = "sn40l"
# Published ratios of the time of a request to that on SN40L.
_REQUEST_RATIOS = {"dgx-h100": 3.7, "dgx-a100": 6.6}
# Smallest and largest published speed-up by fusing operators into one program.
_FUSION = (2.0, 13.0)
# Ratios to try: execution time on a DGX divided by that on SN40L.
_EXECUTION_RATIOS = (1.0, 1.5, 2.0)


def run(published: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
  """Computes the figures of all nodes.

  Args:
    published: Section ``config.published``.
    num_layers: Layers of an expert.

  Returns:
    Plain data: "nodes", switches and capacities; "whole", ratios of requests;
    "solved", the execution times that give the published ratios; "fusion",
    speed-ups by fused operators; "one_node", what fits on one SN40L node; and
    "max_experts", the number of experts that "most_machines" nodes hold.
  """
  expert = published["parameters"] * published["item_bytes"]
  base = NODES[BASE]
  return {
    "nodes": [_node(node, published, expert) for node in NODES.values()],
    "whole": [
      {
        "node": name, "exec_s": exec_s,
        "ratio": relative_request_time(name, expert, exec_s)
      }
      for name in _REQUEST_RATIOS for exec_s in published["exec_s"]
    ],
    "solved": [
      {"node": name, "published": value, "execution": execution,
       "spread": spread,
       "exec_s": solve_exec_s(name, expert, value, execution, spread)}
      for name, value in _REQUEST_RATIOS.items()
      for execution in _EXECUTION_RATIOS
      for spread in (False, True)
    ],
    "fusion": _fusion(base, published, expert, num_layers),
    "max_experts": published["max_experts"],
    "one_node": {
      "experts": published["experts"], "models": published["experts"] + 1,
      "parameters": (published["experts"] + 1) * published["parameters"],
      "bytes": (published["experts"] + 1) * expert,
      "node_bytes": base.host_bytes.value, "held": base.held(expert),
    },
  }


def _node(
  node: Node, published: Mapping[str, Any], expert: float
) -> dict[str, Any]:
  """Returns a node's switch times, capacities and numbers of machines."""
  base = NODES[BASE].switch_s(expert)
  once, spread = node.switch_s(expert), node.switch_s(expert, spread=True)
  return {
    "node": node.name, "switch_s": once, "spread_s": spread,
    "slower": once / base, "spread_slower": spread / base,
    "resident": node.resident(expert), "held": node.held(expert),
    "machines": node.machines(published["experts"] + 1, expert),
    "most_machines": node.machines(published["max_experts"], expert),
  }


def relative_request_time(name: str, expert: float, exec_s: float) -> float:
  """Returns the time of a request with a miss, relative to that on SN40L.

  Args:
    name: Key of `NODES`.
    expert: Bytes of an expert.
    exec_s: Seconds of the execution, equal on both nodes.

  Example:
    >>> [
    ...   round(relative_request_time(name, 13.476831232e9, 0.0595), 1)
    ...   for name in _REQUEST_RATIOS
    ... ]
    [3.7, 6.6]
  """
  own, base = NODES[name].switch_s(expert), NODES[BASE].switch_s(expert)
  return (exec_s + own) / (exec_s + base)


def solve_exec_s(
  name: str, expert: float, published: float, execution: float = 1.0,
  spread: bool = False,
) -> float | None:
  """Returns the execution time on SN40L that gives a ratio of whole requests.

  Args:
    name: Key of `NODES`.
    expert: Bytes of an expert.
    published: Ratio of whole requests.
    execution: Execution time on the node divided by that on SN40L.
    spread: Whether on both nodes each device copies its shard over its own
      link.

  Returns:
    Seconds; None if no execution time gives the ratio.
  """
  own = NODES[name].switch_s(expert, spread)
  base = NODES[BASE].switch_s(expert, spread)
  seconds = (own - published * base) / (published - execution)
  return seconds if seconds > 0 else None


def _fusion(
  node: Node, published: Mapping[str, Any], expert: float, num_layers: int
) -> list[dict[str, Any]]:
  """Returns the speed-up of a decode step by fusion, by the time of a launch.

  A fused step reads the weights once at the devices' rate; an unfused one also
  launches each operator. In rows with "published", the launch time follows from
  a published gain.
  """
  fused = expert / (node.num_devices * node.device_rate.value)
  launches = num_layers * published["operators"]
  rows = [
    {"call_s": call_s, "gain": 1 + launches * call_s / fused}
    for call_s in published["call_s"]
  ]
  return rows + [
    {"call_s": (gain - 1) * fused / launches, "gain": gain, "published": True}
    for gain in _FUSION
  ]
