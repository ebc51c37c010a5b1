"""Compositions of planted kinds: training, resumption and the library."""

import dataclasses
import filecmp
import random
import re
import shutil

from etils import epath
import jax
import numpy as np
import pytest

from caatnet.composition import evaluation, library, training
from caatnet.composition.report import report
from caatnet.config import experiments
from caatnet.data.kinds import KINDS, Kind
from caatnet.schema import tree
from caatnet.serving.experts import Library
from caatnet.serving.router import Router
from caatnet.show import render
from caatnet.train import records
from configs.experts import kinds as config_file
from parallel.base import files

LETTERS = {"python": "abcd", "c": "wxyz"}


def make_config():
  config = config_file.get_config("test")
  config.model.width, config.model.num_layers = 16, 1
  config.model.ffn_width, config.model.num_heads = 32, 2
  config.model.num_kv_heads = 2
  config.data.validation_percent, config.data.validation_windows = 30.0, 8
  config.train.num_steps = 8
  config.kinds.names, config.kinds.count = tuple(LETTERS), 2
  config.kinds.min_bytes = 10_000
  config.kinds.baselines, config.kinds.buckets = False, 32
  config.kinds.learning_rate = 1e-2
  config.kinds.ranks = (1,)
  return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Folder, kinds of text and result of a finished sweep."""
  root = tmp_path_factory.mktemp("composition")
  generator = random.Random(0)
  texts = {}
  for name, letters in LETTERS.items():
    (root / name).mkdir()
    for index in range(30):
      text = "".join(generator.choices(letters, k=1000))
      (root / name / f"{index}.txt").write_text(text)
    texts[name] = Kind(name, ((str(root / name), "*.txt"),))
  workdir = epath.Path(root / "run")
  return workdir, texts, training.run(make_config(), workdir, texts=texts)


def test_experts_are_better_at_their_kind(finished):
  _, _, result = finished
  (seed,) = result["seeds"]
  losses, kinds = seed["losses"], tuple(LETTERS)
  for kind, other in zip(kinds, reversed(kinds), strict=True):
    assert losses[kind][kind] < losses["base"][kind]
    assert losses[kind][kind] < losses[other][kind]
    assert losses["oracle"][kind] == losses[kind][kind]
    assert losses["random"][kind] == pytest.approx(
      (losses[kind][kind] + losses[other][kind]) / 2
    )
  assert seed["options"]["ranks"] == [1]  # those of the stored differences
  # Kinds without a common letter: all prompts are routed to their kinds.
  assert seed["routed_right"] == dict.fromkeys(kinds, 1.0)
  assert losses["routed"] == pytest.approx(losses["oracle"])
  forms = {row["form"]: row for row in seed["forms"]}
  assert forms["whole"]["loss"] == pytest.approx(
    np.mean([losses["oracle"][kind] for kind in kinds]), rel=1e-6
  )
  assert forms["int4"]["size_bytes"] < forms["int8"]["size_bytes"]
  # Of one expert, in float32; one byte per element and scales.
  num = seed["parameters"]["base"]
  assert forms["whole"]["size_bytes"] == 4 * num
  assert num < forms["int8"]["size_bytes"] < 1.3 * num
  assert list(forms) == ["whole", "int8", "int4", "low_rank 1"]
  assert abs(forms["int8"]["loss"] - forms["whole"]["loss"]) < 0.01


def test_experts_are_selected_for_each_sequence():
  each = {
    "base": {"a": [9.0, 9.0], "b": [8.0, 7.0]},
    "a": {"a": [1.0, 2.0], "b": [5.0, 6.0]},
    "b": {"a": [3.0, 7.0], "b": [0.5, 1.0]},
  }
  each = {m: {k: np.array(x) for k, x in of.items()} for m, of in each.items()}
  found = evaluation._mean_losses(each, {"a": ["a", "b"], "b": ["b", "b"]})
  assert found["oracle"] == {"a": 1.5, "b": 0.75}
  assert found["random"] == {"a": 3.25, "b": 3.125}
  assert found["routed"] == {"a": 4.0, "b": 0.75}
  assert found["base"] == {"a": 9.0, "b": 7.5}


def test_prompt_of_one_byte_leaves_the_loss_of_the_whole_text(finished):
  workdir, _, _ = finished
  folder = workdir / "runs" / "c_seed0"
  experiment = experiments.from_folder(folder)
  losses = evaluation._make_loss_function(experiment, 1)(
    library.read_params(folder), evaluation._windows(experiment, folder)
  )
  *_, last = (r for r in records.read_metrics(folder) if "validation_loss" in r)
  assert losses.mean() == pytest.approx(last["validation_loss"], rel=1e-5)
  # The losses of a prompt's own bytes do not depend on the bytes after it.
  windows = evaluation._windows(experiment, folder)[:2].copy()
  windows[1, :5] = windows[0, :5]
  assert (windows[1, 5:] != windows[0, 5:]).any()
  whole, rest = (
    evaluation._make_loss_function(experiment, prompt)(
      library.read_params(folder), windows
    )
    for prompt in (1, 5)
  )
  num = windows.shape[1] - 1
  own = num * whole - (num - 4) * rest
  assert own[0] == pytest.approx(own[1], abs=1e-4)
  assert abs(rest[0] - rest[1]) > 1e-3
  assert evaluation._prompt(np.array([97, 0, 98, 99]), 3) == b"ab"


def test_stored_evaluation_is_read_if_models_and_prompt_are_the_same(
  finished, tmp_path
):
  workdir, of_kinds, _ = finished
  options = tree.parse_section("kinds", make_config().kinds)
  texts, _ = training._collect(
    workdir / "text", of_kinds, names=list(options.names), count=2,
    size_bytes=options.size_bytes, min_bytes=options.min_bytes,
    validation_percent=30.0,
  )
  runs = {
    name: workdir / "runs" / f"{name}_seed0" for name in ("base", *LETTERS)
  }
  router = evaluation.read_router(workdir, 0)
  stored = epath.Path(tmp_path / "seed0.json")

  def found(more=(), **changes):
    return evaluation.evaluate_seed(
      runs | dict(more), router, dataclasses.replace(options, **changes), texts,
      stored, with_forms=False,
    )["losses"]

  first = found()
  stored.write_text(stored.read_text().replace('"oracle"', '"read"'))
  assert "read" in found()
  assert "read" not in found(prompt_bytes=options.prompt_bytes + 1)
  assert found() == first
  assert "union" in found({"union": runs["c"]})


def test_report_has_one_row_per_model_and_no_claim_of_one_seed(finished):
  *_, result = finished
  made = report(result)
  assert [row["model"] for row in made.tables[0].rows] == [
    "base", "experts, random routing", "experts, routed",
    "experts, routed by the true kind",
  ]
  assert "1 seeds: no claim about loss rests on fewer than 3" in made.parts
  render.show(made)


def test_library_has_the_checkpoints_of_the_runs(finished):
  workdir, _, _ = finished
  found = Library(workdir / "library")
  assert {entry.name: entry.origin for entry in found.entries} == {
    "base": "base", "python": "fine-tuned", "c": "fine-tuned",
    **{f"{name}-seed0-step4": "checkpoint" for name in ("base", *LETTERS)},
  }
  assert {entry.name: (entry.kind, entry.description)
          for entry in found.entries if "step4" in entry.name} == {
    "base-seed0-step4": ("", "all kinds of text, seed 0, step 4"),
    **{f"{name}-seed0-step4": (
      name, f"{KINDS[name].description}, seed 0, step 4"
    ) for name in LETTERS},
  }
  text = (workdir / "report.md").read_text()
  assert "loss on held-out text in nats per byte, mean of 1 seeds" in text
  assert (workdir / "runs" / "router_seed0").is_dir()
  params = library.read_params(workdir / "runs" / "c_seed0", 4)
  jax.tree.map(
    np.testing.assert_array_equal, found.read("c-seed0-step4")[1](), params
  )
  assert Router.read(found.path).route(b"zxy", found.entries) == "c"
  library.add_run(
    found, "small", workdir / "runs" / "c_seed0", form="int8", kind="c"
  )
  assert found.read("small")[2:] == ("int8", "base")
  found.remove("small")


def test_library_of_differences_has_the_first_rank(finished, tmp_path):
  workdir, _, _ = finished
  again = epath.Path(shutil.copytree(workdir, tmp_path / "run"))
  shutil.rmtree(again / "library")
  config = make_config()
  config.kinds.form, config.kinds.ranks = "low_rank", (1, 3)
  config.kinds.experts = 4
  options = tree.parse_section("kinds", config.kinds)
  with config.unlocked():
    del config.kinds
  runs = list(training.plan_runs(config, options, tuple(LETTERS), again, 0))
  made = training.write_library({0: runs}, options, again)
  assert made.names == ("base", "python", "c", "base-seed0-step4")
  stored = made.read("python")[1]()
  ranks = {
    key: x.shape[-1] for key, x in stored["blocks"].items() if ":left" in key
  }
  assert ranks == dict.fromkeys(ranks, 1) != {}


def test_run_of_another_model_is_refused(finished, tmp_path):
  """Also if its parameters have the same shapes."""
  workdir, _, _ = finished
  other = tmp_path / "other"
  shutil.copytree(workdir / "runs" / "c_seed0", other)
  path = other / "config.json"
  path.write_text(path.read_text().replace(
    '"rope_base": 10000.0', '"rope_base": 500.0'
  ))
  with pytest.raises(ValueError, match=r"model\.rope_base=500\.0 there"):
    library.add_run(Library(workdir / "library"), "x", other)


@pytest.mark.parametrize(("key", "value", "message"), [
  ("train.num_steps", 9, "finished after 8 steps, but the config has 9"),
  ("kinds.router_steps", 7, "has a router with another"),
  ("kinds.router_prompts", 7, "has a router with another config.kinds"),
  ("kinds.buckets", 31, "has a router with another"),
])
def test_results_of_other_lengths_are_refused(
  finished, tmp_path, key, value, message
):
  workdir, texts, _ = finished
  again = epath.Path(shutil.copytree(workdir, tmp_path / "run"))
  config = make_config()
  config.update_from_flattened_dict({key: value})
  with pytest.raises(ValueError, match=message):
    training.run(config, again, texts=texts)


def test_killed_sweep_resumes_with_equal_bits(finished, tmp_path):
  """The files of a sweep that was killed after step 4 of its last run."""
  workdir, texts, result = finished
  first = tmp_path / "first"
  shutil.move(workdir, first)  # runs name the folder of their base
  try:
    shutil.copytree(first, workdir)
    shutil.rmtree(workdir / "library")
    shutil.rmtree(workdir / "runs" / "c_seed0" / "checkpoints" / "8")
    for name in ("composition.json", "runs/c_seed0/finished"):
      (workdir / name).unlink()
    # An evaluation with another prompt is not read.
    (workdir / "seed0.json").write_text(
      '{"options": {"prompt_bytes": 15, "ranks": [1]}}'
    )
    assert training.run(make_config(), workdir, texts=texts) == result
    left, right = first / "library", workdir / "library"
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    equal, *_ = filecmp.cmpfiles(left, right, names, shallow=False)
    assert sorted(equal) == names
  finally:
    shutil.rmtree(workdir)
    shutil.move(first, workdir)


def test_resumed_sweep_has_the_text_of_its_start(finished, tmp_path):
  """Also if files of the machine have changed; other options are refused."""
  workdir, texts, result = finished
  changed = {
    name: Kind(name, ((str(tmp_path), "*.txt"),)) for name in texts
  }
  assert training.run(make_config(), workdir, texts=changed) == result
  config = make_config()
  config.kinds.size_bytes = 25_000
  with pytest.raises(ValueError, match=r"size_bytes=150000, but the config"):
    training.run(config, workdir, texts=texts)


@pytest.mark.parametrize(("name", "damage", "message"), [
  ("collected.json", lambda x: x[:-9], "collected.json is damaged: "),
  ("collected.json", lambda x: "[]", "collected.json is damaged: "),
  ("collected.json", lambda x: x.replace('"c.v', '"d.v'), "d.validation.jsonl"),
  ("collected.json", lambda x: x.replace('"c"\n', '"d"\n', 1), "d.train.jsonl"),
  ("c.train.jsonl", lambda x: x.partition("\n")[2], "c.train.jsonl is missing"),
  ("union.train.jsonl", lambda x: x + "{", "union.train.jsonl is missing or"),
])
def test_damaged_text_is_named_in_one_line(
  finished, tmp_path, name, damage, message
):
  workdir, texts, _ = finished
  again = epath.Path(shutil.copytree(workdir, tmp_path / "run"))
  path = again / "text" / name
  path.write_text(damage(path.read_text()))
  with pytest.raises(ValueError, match=re.escape(message)) as raised:
    training.run(make_config(), again, texts=texts)
  assert "\n" not in str(raised.value)


def test_text_of_a_sweep_that_was_killed_while_writing_is_written_again(
  finished, tmp_path
):
  """Kills before each of the files; the manifest is the last one."""
  workdir, texts, _ = finished
  options = {
    "names": list(LETTERS), "count": 2, "size_bytes": 150_000,
    "min_bytes": 10_000, "validation_percent": 30.0,
  }
  folder = epath.Path(tmp_path / "text")
  whole = {p.name: p.read_bytes() for p in (workdir / "text").iterdir()}
  for num_whole in range(len(whole)):
    folder.mkdir()
    for name in [*whole][:num_whole]:
      if name != training.MANIFEST_FILE:
        (folder / name).write_bytes(whole[name][: 100 * num_whole])
    training._collect(folder, texts, **options)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    shutil.rmtree(folder)


def test_second_sweep_in_the_same_folder_is_refused(finished):
  workdir, texts, _ = finished
  with (
    files.lock(workdir),
    pytest.raises(ValueError, match=r"--workdir=.* is in use"),
  ):
    training.run(make_config(), workdir, texts=texts)


@pytest.mark.parametrize(("key", "value", "message"), [
  ("kinds.prompt_bytes", 32, "config.kinds.prompt_bytes=32 must be less than"),
  ("data.tokenizer", "x", "config.data.tokenizer='x' must be ''"),
  ("sweep.points", ("seed=1",), "config.sweep.points and config.sweep.sect"),
  ("kinds.min_bytes", 10**9, "only 0 kinds have enough text"),
])
def test_values_without_a_composition_are_refused(
  finished, tmp_path, key, value, message
):
  _, texts, _ = finished
  config = make_config()
  config.update_from_flattened_dict({key: value})
  with pytest.raises(ValueError, match=re.escape(message)):
    training.run(config, epath.Path(tmp_path), texts=texts)
