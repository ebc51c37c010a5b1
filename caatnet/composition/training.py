"""Sweep that trains a composition: a base, a router, and an expert per kind.

For each seed, a base is trained on the union of all kinds of text. Each expert
is initialised with the base's parameters and trained on one kind of text. There
are two baselines. "union" is the base after further training on the union, with
as many tokens as all experts together. "same" is a single model with as many
parameters as router and expert together, trained on the union with as many
tokens as base and expert together. The same command resumes a stopped sweep.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import sys
from typing import Any

from etils import epath
import ml_collections

from caatnet.composition import evaluation, library
from caatnet.composition.report import report
from caatnet.config import experiments
from caatnet.config.override import Sweep, take_sweep
from caatnet.data import kinds
from caatnet.data.kinds import Text
from caatnet.schema import tree
from caatnet.schema.kinds import Kinds
from caatnet.show import render
from caatnet.train import loop, records
from parallel.base import files
from parallel.ledger import persistent

BASE, UNION, SAME_SIZE = "base", "union", "same"
RESULT, LIBRARY = "composition.json", "library"
MANIFEST_FILE = "collected.json"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """Training run of the sweep.

  Attributes:
    name: "base", "union", "same", or the kind of an expert.
    seed: Seed of the run.
    folder: Folder of the run.
    config: Config of the run.
  """

  name: str
  seed: int
  folder: epath.Path
  config: ml_collections.ConfigDict


def run(
  config: ml_collections.ConfigDict,
  workdir: epath.Path,
  mesh: Mapping[str, int] | None = None,
  seeds: Sequence[int] = (),
  texts: Mapping[str, kinds.Kind] | None = None,
) -> dict[str, Any]:
  """Trains and evaluates a composition, and writes its library of experts.

  Args:
    config: Config of the base's run, with the sections ``kinds`` and ``sweep``.
    workdir: Folder of the sweep, on this machine.
    mesh: Devices per axis; None for the default assignment.
    seeds: The seeds; () for those of ``config.sweep``.
    texts: Kinds of text by name; None for those of `kinds.KINDS`.

  Returns:
    Plain data, as in the file `RESULT`: "kinds", their names; "seeds", the
    result of `evaluation.evaluate_seed` for each seed; and "left_out", messages
    about kinds without enough text.

  Raises:
    SystemExit: A signal has stopped a run, which has been saved.
    ValueError: A value is not allowed, there are fewer than two kinds with
      enough text, another process uses the folder, or a file is damaged.
  """
  config = config.copy_and_resolve_references()
  options: Kinds = tree.parse_section("kinds", config.kinds)
  with config.unlocked():
    del config.kinds
  study = take_sweep(config)
  seeds = tuple(seeds) or study.seeds
  _check(config, options, study, seeds)
  persistent.enable_compile_cache(str(workdir / "programs"))
  workdir.mkdir(parents=True, exist_ok=True)
  with files.lock(workdir):
    found, messages = _collect(
      workdir / "text", texts, names=list(options.names), count=options.count,
      size_bytes=options.size_bytes, min_bytes=options.min_bytes,
      validation_percent=config.data.validation_percent,
    )
    for name, text in found.items():
      print(f"{name:14}{text.describe()}")
    print(*messages, sep="\n", end="\n" if messages else "")
    runs = {
      seed: list(plan_runs(config, options, tuple(found), workdir, seed))
      for seed in seeds
    }
    rows = []
    for seed, of_seed in runs.items():
      router = evaluation.train_or_read_router(workdir, options, found, seed)
      for index, one in enumerate(of_seed):
        print(f"seed {seed}, run {index + 1} of {len(of_seed)}: {one.name}")
        _train(one, mesh)
      rows.append(evaluation.evaluate_seed(
        {one.name: one.folder for one in of_seed}, router, options, found,
        workdir / f"seed{seed}.json",
        with_forms=len(rows) < options.forms_seeds,
      ))
    result = {"kinds": list(found), "seeds": rows, "left_out": messages}
    records.write_json(workdir / RESULT, result)
    write_library(runs, options, workdir)
    made = report(result)
    render.show(made)
    files.replace(workdir / "report.md", render.markdown(made))
    print(f"library of experts: {workdir / LIBRARY}")
    return result


def _check(
  config: ml_collections.ConfigDict, options: Kinds, study: Sweep,
  seeds: Sequence[int],
) -> None:
  """Raises ValueError for values that a composition cannot have."""
  if study.points != ("",) or study.sections:
    raise ValueError(
      "config.sweep.points and config.sweep.sections have no effect with "
      "config.kinds"
    )
  if not seeds or not options.ranks:
    raise ValueError(
      "config.sweep.seeds and config.kinds.ranks must each have a value"
    )
  if options.prompt_bytes >= config.data.seq_len:
    raise ValueError(
      f"config.kinds.prompt_bytes={options.prompt_bytes} must be less than "
      f"config.data.seq_len={config.data.seq_len}"
    )
  if config.data.tokenizer:
    raise ValueError(
      f"config.data.tokenizer={config.data.tokenizer!r} must be '': routers "
      "read bytes"
    )


def plan_runs(
  config: ml_collections.ConfigDict, options: Kinds, names: tuple[str, ...],
  workdir: epath.Path, seed: int,
) -> Iterator[PlannedRun]:
  """Yields the runs of a seed in the order in which they must be trained.

  Args:
    config: Config of the base's run.
    options: Section ``kinds``.
    names: Names of the kinds of text.
    workdir: Folder of the sweep.
    seed: The seed.
  """
  base_folder = workdir / "runs" / f"{BASE}_seed{seed}"

  def made(name, corpus, num_steps, from_base):
    own = config.copy_and_resolve_references()
    own.name, own.seed = name, seed
    own.data.path = str(workdir / "text" / f"{corpus}.train.jsonl")
    own.data.validation_path = str(
      workdir / "text" / f"{corpus}.validation.jsonl"
    )
    own.train.num_steps = num_steps
    if from_base:
      own.train.init_from = str(base_folder)
      own.optimizer.learning_rate = options.learning_rate
    # Keeps all checkpoints, since the library may store them as experts, too.
    own.train.keep_checkpoints = 1 + num_steps // own.train.checkpoint_every
    folder = workdir / "runs" / f"{name}_seed{seed}"
    return PlannedRun(name, seed, folder, own)

  steps = config.train.num_steps
  yield made(BASE, UNION, steps, False)
  for name in names:
    yield made(name, name, options.expert_steps, True)
  if options.baselines:
    yield made(UNION, UNION, len(names) * options.expert_steps, True)
    same = made(SAME_SIZE, UNION, steps + options.expert_steps, False)
    # Widens the MLPs by the router's number of parameters. A hidden channel of
    # an MLP has 3 x width parameters.
    extra = (options.buckets + 1) * len(names)
    model = same.config.model
    model.ffn_width += math.ceil(extra / (3 * model.width * model.num_layers))
    yield same


def write_library(
  runs: Mapping[int, list[PlannedRun]], options: Kinds, workdir: epath.Path
) -> library.Library:
  """Writes the library of experts of finished runs.

  The library has the base and the fine-tuned experts of the first seed, then
  experts of other seeds and earlier checkpoints, up to ``options.experts`` in
  total. The report does not depend on other seeds' experts and checkpoints.
  """
  first = next(iter(runs))
  (base, *_) = runs[first]
  made = library.create(workdir / LIBRARY, base.folder)
  evaluation.read_router(workdir, first).write(workdir / LIBRARY)
  experiment = experiments.from_folder(base.folder)
  for name, one, step, origin in _experts(runs, first):
    if len(made.names) >= options.experts:
      break
    if name in made.names:
      continue
    expert = one.name not in (BASE, UNION)
    library.add_run(
      made, name, one.folder, step, form=options.form, rank=options.ranks[0],
      experiment=experiment, kind=one.name if expert else "", origin=origin,
      description=(
        kinds.KINDS[one.name].description if one.name in kinds.KINDS
        else "all kinds of text"
      ) + f", seed {one.seed}, step {step}",
    )
  return made


def _experts(
  runs: Mapping[int, list[PlannedRun]], first: int
) -> Iterator[tuple[str, PlannedRun, int, str]]:
  """Yields name, training run, step and origin of experts, by preference.

  ``first`` is the seed whose experts precede those of other seeds.
  """
  # "same" has other shapes than the base, so it cannot be an expert.
  usable = [x for of in runs.values() for x in of if x.name != SAME_SIZE]
  tuned = [x for x in usable if x.name not in (BASE, UNION)]
  for one in tuned:
    if one.seed == first:
      yield one.name, one, one.config.train.num_steps, "fine-tuned"
  for one in usable:
    last = one.config.train.num_steps
    if one.seed != first:
      yield f"{one.name}-seed{one.seed}", one, last, "seed"
    elif one.name == UNION:
      yield f"{one.name}-step{last}", one, last, "checkpoint"
  for one in usable:
    every, last = one.config.train.checkpoint_every, one.config.train.num_steps
    for step in range(every, last, every):
      yield f"{one.name}-seed{one.seed}-step{step}", one, step, "checkpoint"


def _train(one: PlannedRun, mesh: Mapping[str, int] | None) -> None:
  """Trains the planned run ``one`` unless it is finished."""
  done, steps = one.folder / "finished", f"{one.config.train.num_steps}\n"
  if done.exists():
    if done.read_text() != steps:  # experts start from the run's last step
      raise ValueError(
        f"{one.folder} finished after {done.read_text().strip()} steps, but "
        f"the config has {steps.strip()}; use another --workdir"
      )
    records.write_config(one.folder, json.loads(one.config.to_json()))
    return
  experiment = experiments.build(one.config, mesh)
  result = loop.train(
    experiment, one.folder, label=f"{one.name} seed={one.seed}"
  )
  if not result.finished:
    sys.exit(result.exit_code)
  files.replace(done, steps)


def _collect(
  folder: epath.Path, texts: Mapping[str, kinds.Kind] | None, **options: Any
) -> tuple[dict[str, Text], list[str]]:
  """Returns the texts of a sweep by kind, and messages about omitted kinds.

  The first start of a sweep collects them with `kinds.read_available` and
  stores them. A resumed sweep reads what was stored, since the machine's files
  may have changed in the meantime, for example by an update.

  Args:
    folder: The folder for the corpora, as .jsonl files.
    texts: Kinds of text by name; None for those of `kinds.KINDS`.
    **options: Arguments of `kinds.read_available`.

  Raises:
    ValueError: There are fewer than two kinds, the options have changed, or a
      file is damaged.
  """
  path = folder / MANIFEST_FILE
  if path.exists():
    collected = kinds.read_manifest(path)
    old = {tree.RENAMED.get(k, k): v for k, v in collected.options.items()}
    for name, value in options.items():
      found = old.get(name)
      if found != value:
        raise ValueError(
          f"{path} has text that was collected with {name}={found}, but the "
          f"config has {value}; use another --workdir"
        )
    corpora = kinds.read_corpora(folder, collected.kinds, collected.files)
    return corpora, list(collected.left_out)
  found, left_out = kinds.read_available(**options, kinds=texts)
  if len(found) < 2:
    raise ValueError(
      f"config.kinds.names: only {len(found)} kinds have enough text on this "
      "machine; lower config.kinds.min_bytes"
    )
  written = kinds.write_corpora(found, folder)
  records.write_json(path, {  # written last: the corpora are complete
    "kinds": list(found), "left_out": left_out, "options": options,
    "files": written,
  })
  return found, left_out
