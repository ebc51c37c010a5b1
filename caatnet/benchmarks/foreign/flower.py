"""Rounds here and in Flower: the same client, in turns, on the same links.

Both systems run a server and clients as processes in network namespaces of
their own (`flower_session.py`). Figures are from the records of the clients
(`flower_client.py`), which are the same program in both systems:

  round time     from the first client's begin of ``fit`` to that of the next
                 round, median of rounds
  bytes          of the server's network device in the whole run, TCP and IP
                 headers included, per client and round
  CPU            processor time of a client's process per round
  accuracy       mean over clients of the accuracies of a revision, weighted by
                 their validation examples

The client is a network in numpy, or the model of the config, for which Flower's
environment also finds the packages of this Python. Without training ("idle")
``fit`` returns what it receives and models are not
evaluated: the round time is the overhead of the system.
"""

from collections.abc import Iterable, Mapping, Sequence
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any, NamedTuple

import numpy as np

from caatnet.benchmarks.federated import emulation
from caatnet.benchmarks.foreign import flower_client
from caatnet.benchmarks.harness import environments, processes, setup, timing
from caatnet.benchmarks.harness.kept import Kept
from caatnet.show import render

PACKAGES = ("flwr==1.42.0",)
SYSTEMS = ("ours", "flower")
_SKIPPED = 2  # rounds in which programs are compiled and buffers grow
_LOOPBACK = "loopback"
_CELL = ("clients", "link", "idle", "model")  # keys by which cells differ
_ROOT = pathlib.Path(__file__).parents[3]

Records = list[list[dict[str, Any]]]  # of each client


def run(config: Any) -> dict[str, Any]:
  """Runs all cells in both systems, prints a table, and returns plain data.

  Args:
    config: Config like configs/benchmark/flower.py.

  Raises:
    ValueError: The environment cannot be made, there are no namespaces, or a
      run fails.
  """
  options = config.benchmark
  cells = [
    *({"clients": n, "link": _LOOPBACK} for n in options.clients),
    *({"clients": n, "link": _LOOPBACK, "idle": True} for n in options.idle),
    *({"clients": options.clients[0], "link": name} for name in options.links),
    *({"clients": n, "link": _LOOPBACK, "model": config.model.name}
      for n in options.with_model),
  ]
  kept = Kept(config, rows=[])
  rows = kept.found["rows"]
  cells = [cell for cell in cells if not any(
    all(row.get(key) == cell.get(key) for key in _CELL) for row in rows
  )]
  if cells:
    python = environments.create(
      pathlib.Path(options.folder) / "flower", PACKAGES, options.python
    )
    if options.with_model:
      _share_packages(python)
  with tempfile.TemporaryDirectory() as folder:
    data = _write_digits(pathlib.Path(folder))
    for cell in timing.progress(cells, "federated runs"):
      rounds: dict[str, list[dict[str, Any]]] = {s: [] for s in SYSTEMS}
      measured: list[dict[str, Any]] = []
      for seed in options.seeds:
        for system in SYSTEMS:
          found = _session(system, cell, seed, config, python, data)
          rounds[system].append(measures(found.records, found.num_bytes))
          measured = found.links
      rows.append({
        **cell, **{s: summary(found) for s, found in rounds.items()},
        **differences(*rounds.values()), "load": timing.load(),
        "links": measured,
      })
      kept.save()
      render.show(*emulation.parts(
        "links by network namespaces, before the last run", measured
      ), _line(rows[-1]))
  result = {
    "width": options.width, "parameters": 75 * options.width + 10,
    "steps": options.steps, "rows": rows,
    "versions": dict(p.split("==") for p in PACKAGES),
  }
  _print(result)
  return result


class Session(NamedTuple):
  """Result of one run.

  Attributes:
    records: Lines of each client's file.
    num_bytes: Bytes of the server's network device.
    links: Shaped and measured values of each client's link; [] on loopback.
  """

  records: Records
  num_bytes: int
  links: list[dict[str, Any]]


def _session(
  system: str, cell: Mapping[str, Any], seed: int, config: Any,
  python: pathlib.Path, data: pathlib.Path,
) -> Session:
  """Runs a cell in a system."""
  options, idle = config.benchmark, bool(cell.get("idle"))
  loopback = cell["link"] == _LOOPBACK
  with tempfile.TemporaryDirectory(dir=data.parent) as folder:
    given = {
      "data": str(data), "folder": folder, "python": str(python),
      "clients": cell["clients"], "rounds": options.rounds, "seed": seed,
      "width": options.width, "steps": 0 if idle else options.steps,
      "evaluate": not idle, "link": "" if loopback else cell["link"],
      "config": (
        setup.without_benchmark(config).to_json() if "model" in cell else ""
      ),
    }
    command = [
      *(["unshare", "-rn"] if loopback else []), *processes.with_parent(),
      *processes.module("caatnet.benchmarks.foreign.flower_session", system),
    ]
    environment = os.environ | processes.ONE_THREAD | {
      flower_client.OPTIONS: json.dumps(given), "JAX_PLATFORMS": "cpu",
      "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(_ROOT),
      "JAX_COMPILATION_CACHE_DIR": str(data.parent / "programs"),
    }
    try:
      ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
      )
    except OSError as error:
      raise ValueError(f"a run of {system}: {error}") from error
    if ended.returncode:
      last = ended.stderr.strip().splitlines()[-1:]
      log = pathlib.Path(folder, "server.log")
      text = log.read_text().strip() if log.exists() else ""
      raise ValueError(
        f"a run of {system}: {''.join(last)}; its server: {text[-400:]!r}"
      )
    records = [
      [json.loads(x) for x in path.read_text().splitlines()]
      for path in sorted(pathlib.Path(folder).glob("client-*.jsonl"))
    ]
    printed = json.loads(ended.stdout.splitlines()[-1])
    return Session(records, printed["bytes"], printed["links"])


def measures(records: Records, num_bytes: int) -> dict[str, Any]:
  """Returns the measures of one run.

  Args:
    records: Lines of each client's file.
    num_bytes: Bytes of the server's network device.
  """
  fits = [[r for r in mine if r["call"] == "fit"] for mine in records]
  clients, rounds = len(fits), len(fits[0])
  first = [min(mine[i]["begin"] for mine in fits) for i in range(rounds)]
  spans = np.diff(first[_SKIPPED:])
  evaluated: dict[int, list[dict[str, Any]]] = {}
  for r in (r for mine in records for r in mine if r["call"] == "evaluate"):
    evaluated.setdefault(r["round"], []).append(r)
  cpu = [mine[-1]["cpu_s"] - mine[_SKIPPED]["cpu_s"] for mine in fits]
  return {
    "round_s": float(np.median(spans)),
    "kilobytes": num_bytes / rounds / clients / 1e3,
    "client_cpu_s": float(np.mean(cpu)) / len(spans),
    **{
      name: {
        str(k): float(np.average(
          [r[name] for r in mine], weights=[r["examples"] for r in mine]
        )) for k, mine in sorted(evaluated.items()) if len(mine) == clients
      } for name in ("loss", "accuracy")
    },
  }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the medians of all seeds, and accuracy and loss of each."""
  return {
    name: float(np.median([found[name] for found in runs]))
    for name in ("round_s", "kilobytes", "client_cpu_s")
  } | {
    "round_s_of_seeds": [found["round_s"] for found in runs],
    "loss": [found["loss"] for found in runs],
    "accuracy": [found["accuracy"] for found in runs],
  }


def differences(
  ours: Iterable[Mapping[str, Any]], flower: Iterable[Mapping[str, Any]]
) -> dict[str, float | int]:
  """Returns the largest differences between the two systems' revisions."""
  pairs = list(zip(ours, flower, strict=True))
  return {
    "compared": sum(len(a["loss"].keys() & b["loss"].keys()) for a, b in pairs),
    **{
      f"largest_difference_of_{name}": max((
        abs(a[name][k] - b[name][k])
        for a, b in pairs for k in a[name].keys() & b[name].keys()
      ), default=0.0)
      for name in ("loss", "accuracy")
    },
  }


def _share_packages(python: pathlib.Path) -> None:
  """Adds the packages of this Python to an environment, after its own.

  Raises:
    ValueError: The environment is of another version.
  """
  name = f"python{sys.version_info.major}.{sys.version_info.minor}"
  folder = python.parents[1] / "lib" / name / "site-packages"
  if not folder.is_dir():
    raise ValueError(
      f"config.benchmark.with_model needs an environment of {name}, but "
      f"{folder} does not exist: config.benchmark.python=''"
    )
  own = sysconfig.get_paths()["purelib"]
  (folder / "shared.pth").write_text(f"{own}\n")


def _write_digits(folder: pathlib.Path) -> pathlib.Path:
  from sklearn import datasets

  images, labels = datasets.load_digits(return_X_y=True)
  path = folder / "digits.npz"
  np.savez(path, images=np.float32(images / 16), labels=labels)
  return path


def _client(row: Mapping[str, Any]) -> str:
  """Returns the kind of a cell's clients."""
  return "idle" if row.get("idle") else row.get("model", "numpy")


def _line(row: Mapping[str, Any]) -> str:
  """Returns the progress after a cell."""
  return f"{row['clients']} {_client(row)} clients, {row['link']}: " + (
    ", ".join(f"{s} {1e3 * row[s]['round_s']:,.0f} ms" for s in SYSTEMS)
  )


def _print(result: Mapping[str, Any]) -> None:
  render.table(
    f"Rounds here / in Flower: {result['parameters']:,} parameters in numpy, "
    f"{result['steps']} steps",
    ["clients", "link", "client", "round, ms", "kB per client",
     "client CPU, ms", "revisions", "largest differences: loss, accuracy"],
    [
      [
        str(row["clients"]), row["link"],
        _client(row),
        *(
          " / ".join(format(scale * row[s][name], ",.0f") for s in SYSTEMS)
          for name, scale in (("round_s", 1e3), ("kilobytes", 1.0),
                              ("client_cpu_s", 1e3))
        ),
        str(row["compared"]),
        "{:.1e}, {:.1e}".format(*(
          row[f"largest_difference_of_{name}"] for name in ("loss", "accuracy")
        )) if row["compared"] else "-",
      ]
      for row in result["rows"]
    ],
  )
