"""Script that solves a device order by CP-SAT, in a Python with ortools.

The script reads a problem from stdin, a line of JSON, and writes one: the best
"order" (null for none), a lower "bound" in seconds on all orders, whether the
order is "proven" optimal, and the solver's "seconds". Each coordinate of the
grid has a different device; each link's
cost is read from a table of all pairs. Costs are rounded down to multiples of a
ten-thousandth of the best known order's cost, so the bound remains a lower one.
"""

import json
import sys

import numpy as np


def main() -> None:
  """Solves one problem of stdin, and writes the order found."""
  from ortools.sat.python import cp_model

  problem = json.loads(sys.stdin.readline())
  known = problem["known"]
  step = known / 1e4
  size = problem["size"]
  model = cp_model.CpModel()
  device = [model.new_int_var(0, size - 1, f"x{i}") for i in range(size)]
  model.add_all_different(device)
  most, total = int(known / step) + 1, []
  for kind in problem["kinds"]:
    costs = np.floor(np.array(kind["seconds"]) / step).astype(int)
    worst = model.new_int_var(0, most, "worst")
    total.append(worst)
    links = []
    for source, target in zip(kind["source"], kind["target"], strict=True):
      link = model.new_int_var(0, most, "link")
      model.add_allowed_assignments(
        [device[source], device[target], link],
        [(a, b, int(costs[a, b])) for a in range(size) for b in range(size)
         if a != b and costs[a, b] <= most],
      )
      links.append(link)
    for pipeline in kind["sums"]:  # indices of links whose costs are summed
      model.add(worst >= sum(links[i] for i in pipeline))
  model.minimize(sum(total))
  solver = cp_model.CpSolver()
  solver.parameters.max_time_in_seconds = problem["limit_s"]
  solver.parameters.num_workers = 2
  solver.parameters.random_seed = 0
  for variable, value in zip(device, problem["hint"], strict=True):
    model.add_hint(variable, value)
  status = solver.solve(model)
  found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
  print(json.dumps({
    "order": [solver.value(x) for x in device] if found else None,
    "bound": solver.best_objective_bound * step,
    "proven": status == cp_model.OPTIMAL,
    "seconds": solver.wall_time,
  }))


if __name__ == "__main__":
  main()
