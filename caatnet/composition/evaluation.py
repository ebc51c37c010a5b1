"""Evaluation of a composition of experts, and of its baselines.

A held-out sequence consists of a prompt, which the router receives, and a
completion. Each expert is trained on one kind of text. The expert of a sequence
is selected by the router ("routed"), by the sequence's true kind ("oracle") or
at random ("random"); its mean loss over the completion is the sequence's loss.

Shape legend: N = sequences of a kind, T = tokens of a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from etils import epath
import jax
import numpy as np

from caatnet.composition import library, routing
from caatnet.config import experiments
from caatnet.data.kinds import Text
from caatnet.data.sources import SEPARATOR
from caatnet.schema.kinds import Kinds
from caatnet.serving import differences
from caatnet.serving.router import FILE, Router
from caatnet.train import evaluate, records
from caatnet.train.experiment import Experiment
from parallel.base import files

_CODES = ("whole", "int8", "int4")


def train_or_read_router(
  workdir: epath.Path, options: Kinds, texts: Mapping[str, Text], seed: int
) -> Router:
  """Returns a seed's router, which selects an expert for a prompt.

  If no router is stored for the seed, trains and stores one.

  Raises:
    ValueError: The stored router was trained with other options.
  """
  folder = _router_folder(workdir, seed)
  used = _router_options(options)
  if (folder / FILE).exists():
    if files.read_json(folder / "options.json") != used:
      raise ValueError(
        f"{folder} has a router with another config.kinds.router_prompts, "
        "router_steps or buckets; use these values, or another --workdir"
      )
  else:
    router = routing.train_router(
      {name: text.train for name, text in texts.items()},
      options.router_prompts, options.buckets, options.router_steps, seed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    records.write_json(folder / "options.json", used)
    router.write(folder)
  return Router.read(folder)


def read_router(workdir: epath.Path, seed: int) -> Router:
  """Reads the router of prompts that `train_or_read_router` has stored."""
  return Router.read(_router_folder(workdir, seed))


def _router_options(options: Kinds) -> dict[str, int]:
  keys = "router_prompts", "router_steps", "buckets"
  return {key: getattr(options, key) for key in keys}


def _router_folder(workdir: epath.Path, seed: int) -> epath.Path:
  return workdir / "runs" / f"router_seed{seed}"


def evaluate_seed(
  folders: Mapping[str, epath.Path],
  router: Router,
  options: Kinds,
  texts: Mapping[str, Text],
  stored: epath.Path,
  *,
  with_forms: bool,
) -> dict[str, Any]:
  """Evaluates the models of one seed, or reads their stored evaluation.

  Args:
    folders: Folder of each run by name.
    router: The router, which selects an expert for a prompt.
    options: Section ``kinds``.
    texts: The texts by kind.
    stored: JSON file of the result; it is read if its options are the same.
    with_forms: Whether to evaluate compressed experts, too, which are stored as
      differences from the base.

  Returns:
    Plain data: "options" of the evaluation; "losses" by model or selection
    method, then by kind, in nats per byte; "routed_right", the fraction of
    sequences that the router assigns to their kind; "accuracy", the same for
    prompts of several lengths; "parameters", their number by model; "sha256" of
    the texts; "forms", sizes and losses of the compressed experts.
  """
  used = {
    "models": sorted(folders), "prompt_bytes": options.prompt_bytes,
    "ranks": list(options.ranks) if with_forms else [],
  }
  if stored.exists():
    result = files.read_json(stored)
    if result.get("options") == used:
      return result
  # Experts and "union" have the base's shapes; the baseline "same" is wider.
  experiment = {
    name: experiments.from_folder(path) for name, path in folders.items()
    if name in ("base", "same")
  }
  params = {
    name: library.read_params(
      path, None, experiment["same" if name == "same" else "base"]
    )
    for name, path in folders.items()
  }
  windows = {
    kind: _windows(experiment["base"], folders[kind]) for kind in texts
  }
  scores = {
    name: _make_loss_function(x, options.prompt_bytes)
    for name, x in experiment.items()
  }

  def losses(tree: Any, kind: str, model: str = "base") -> np.ndarray:
    return scores[model](tree, windows[kind])

  each = {
    name: {
      kind: losses(tree, kind, "same" if name == "same" else "base")
      for kind in texts
    }
    for name, tree in params.items()
  }  # model -> kind -> [N]
  chosen = {
    kind: [router.kind(_prompt(x, options.prompt_bytes)) for x in windows[kind]]
    for kind in texts
  }
  result = {
    "options": used,
    "losses": _mean_losses(each, chosen),
    "routed_right": {
      kind: float(np.mean([name == kind for name in names]))
      for kind, names in chosen.items()
    },
    "accuracy": routing.accuracy(
      router, {kind: text.validation for kind, text in texts.items()}, seed=0
    ),
    "parameters": {
      name: x.program.model.num_params for name, x in experiment.items()
    } | {"router": router.num_params},
    "sha256": {kind: text.sha256 for kind, text in texts.items()},
    "forms": _evaluate_forms(
      params, options, losses, texts
    ) if with_forms else [],
  }
  records.write_json(stored, result)
  return files.read_json(stored)  # keys are strings, as in a resumed sweep


def _windows(base: Experiment, folder: epath.Path) -> np.ndarray:
  """Returns the held-out sequences of a run's text, int32 ``[N, T + 1]``."""
  section = records.read_config(folder)["data"]
  data = dataclasses.replace(
    base.data, path=section["path"], validation_path=section["validation_path"]
  )
  return data.load(base.seed).validation


def _mean_losses(
  each: Mapping[str, Mapping[str, np.ndarray]],
  chosen: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, float]]:
  """Returns mean losses by model or selection method, then by kind of text.

  Args:
    each: Losses ``[N]`` by model and kind.
    chosen: Kind that the router selects for each sequence, by true kind.
  """
  found = {
    name: {kind: float(x.mean()) for kind, x in by_kind.items()}
    for name, by_kind in each.items()
  }
  found["oracle"] = {kind: found[kind][kind] for kind in chosen}
  found["random"] = {
    kind: float(np.mean([found[name][kind] for name in chosen]))
    for kind in chosen
  }
  found["routed"] = {
    kind: float(np.mean([each[name][kind][i] for i, name in enumerate(names)]))
    for kind, names in chosen.items()
  }
  return found


def _make_loss_function(
  experiment: Experiment, prompt: int
) -> Callable[[Any, np.ndarray], np.ndarray]:
  """Returns a function: parameters, int32 ``[N, T + 1]`` -> losses ``[N]``."""
  scores = evaluate.make_scores(experiment.program, experiment.data.batch_size)
  shardings = experiment.program.layout.shardings(
    experiment.program.unpartitioned_specs
  )

  def losses(tree: Any, examples: np.ndarray) -> np.ndarray:
    found = scores(jax.device_put(tree, shardings), examples)["loss"]
    # Target i is token i + 1: targets from `prompt` - 1 on follow the prompt.
    return found[:, prompt - 1 :].mean(axis=1, dtype=np.float64)

  return losses


def _prompt(window: np.ndarray, length: int) -> bytes:
  """Returns the prompt of a window of byte tokens, without separators."""
  return bytes(window[:length].astype(np.uint8)).replace(SEPARATOR, b"")


def _evaluate_forms(
  params: Mapping[str, Any],
  options: Kinds,
  losses: Callable[[Any, str], np.ndarray],
  texts: Mapping[str, Text],
) -> list[dict[str, Any]]:
  """Returns experts' mean size and loss for each compressed form of storage.

  ``losses`` is a function: parameters, kind of text -> losses ``[N]``.
  """
  restore = jax.jit(differences.restore, static_argnames="form")
  base = params["base"]
  rows = []
  for form, rank in (
    *((form, 0) for form in _CODES), *(("low_rank", r) for r in options.ranks)
  ):
    sizes, found = [], []
    for kind in texts:
      stored = differences.encode(params[kind], base, form, rank)
      sizes.append(differences.size_bytes(stored))
      tree = jax.device_get(restore(base, stored, form=form))
      found.append(float(losses(tree, kind).mean()))
    rows.append({
      "form": f"{form} {rank}" if rank else form,
      "size_bytes": float(np.mean(sizes)),
      "loss": float(np.mean(found)),
    })
  return rows
