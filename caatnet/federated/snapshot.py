"""State of a federated server on disk.

A snapshot is one file, replaced as a whole (`parallel.base.atomic`).
`service.py` writes one at the start of each round, before a client receives its
work.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from caatnet.federated.server import Member, Rules, ServerState
from parallel.base import atomic
from parallel.base.arrays import read_npz

_SCALARS = ("round", "revision", "started", "best", "stale", "finished")
# Rules that a resumed run may change.
_CHANGEABLE_RULES = ("rounds", "reconnect_s", "hang_s", "max_examples")
# Former name of a rule -> its present name.
_RENAMED = {"least_gain": "min_gain", "most_examples": "max_examples"}


def write(path: pathlib.Path, state: ServerState, rules: Rules) -> None:
  """Writes a state between rounds; it is on disk when this returns.

  Args:
    path: Path of the file.
    state: State without received updates.
    rules: Constants of the run.
  """
  assert not state.received, "received updates are not saved"
  meta = {
    "rules": dataclasses.asdict(rules),
    **{name: getattr(state, name) for name in _SCALARS},
    "members": {k: dataclasses.asdict(m) for k, m in state.members.items()},
    "history": dict(state.history),
    "counts": dict(state.counts),
  }
  arrays = {
    "params": state.params,
    # Without a coded downlink, clients hold the parameters themselves.
    **(
      {} if state.published is state.params
      else {"published": state.published}
    ),
    # Left out for the round in progress, which restarts from `published`.
    **{f"base_{r}": x for r, x in state.bases.items() if r != state.round},
    **{f"optimizer_{i}": x for i, x in enumerate(state.optimizer)},
    **{
      f"difference_{i}": np.frombuffer(data, np.uint8)
      for i, data in enumerate(state.differences)
    },
  }
  # The file has a CRC-32 for each array, but none for the list of arrays.
  text = json.dumps(meta | {"arrays": [*arrays]})
  arrays["meta"] = np.frombuffer(text.encode(), np.uint8)
  with atomic.atomic_file(path) as temporary:
    np.savez(temporary, **arrays)


def read(path: pathlib.Path, rules: Rules) -> ServerState | None:
  """Returns the state that `write` saved; None if there is no file.

  Raises:
    ValueError: The file is damaged, or is of a run with other rules.
  """
  if not path.exists():
    return None
  try:
    found = read_npz(path)
    meta = json.loads(found.pop("meta").tobytes())
    if {*meta.get("arrays", found)} != {*found}:  # old files have no list
      raise ValueError(
        f"it has the arrays {', '.join(found)}, expected "
        f"{', '.join(meta['arrays'])}"
      )
    params, old = found["params"], dict(meta["rules"])
    state = ServerState(
      params=params,
      published=found.get("published", params),
      optimizer=_numbered(found, "optimizer"),
      differences=tuple(x.tobytes() for x in _numbered(found, "difference")),
      members={int(k): Member(**m) for k, m in meta["members"].items()},
      history={int(k): tuple(v) for k, v in meta["history"].items()},
      bases={
        int(key.removeprefix("base_")): x for key, x in found.items()
        if key.startswith("base_")
      },
      counts=meta["counts"],
      **{name: meta[name] for name in _SCALARS},
    )
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  _check_rules(path, old, rules)
  return state


def _numbered(
  found: Mapping[str, np.ndarray], name: str
) -> tuple[np.ndarray, ...]:
  """Returns the arrays ``name_0``, ``name_1``, ... in order."""
  num = sum(key.startswith(f"{name}_") for key in found)
  return tuple(found[f"{name}_{i}"] for i in range(num))


def _check_rules(
  path: pathlib.Path, old: Mapping[str, Any], rules: Rules
) -> None:
  """Raises ValueError if a run would continue with rules other than its own."""
  # Files of older versions lack new rules (with defaults) and use former names.
  missing = dataclasses.MISSING
  old = {
    f.name: f.default for f in dataclasses.fields(rules)
    if f.default is not missing
  } | {_RENAMED.get(name, name): value for name, value in old.items()}
  for name, value in dataclasses.asdict(rules).items():
    if old.get(name) != value and name not in _CHANGEABLE_RULES:
      raise ValueError(
        f"{path} is from a run with {name}={old.get(name)!r}, but this run has "
        f"{value!r}; restore this value, or choose another workdir"
      )
