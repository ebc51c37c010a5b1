"""Published models: ours computes what the reference does, and back again.

The checkpoints of `tests/fixtures/families` and their logits were made by
`tests/fixtures/make_families.py`.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import chex
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import safetensors.numpy

from caatnet.config import experiments
from caatnet.config.schema import tree
from caatnet.data.tokenizers import LibraryTokenizer
from caatnet.interop import families, huggingface, layout, tensors
from caatnet.interop.source import make_config, open_source
from caatnet.train import tokenizer
from caatnet.train.checkpoint import slices
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.checkpoint.save import Checkpointer
from configs.caatnet import base, tiny
from tests.caatnet.data.small_tokenizers import llama_files

ROOT = pathlib.Path(__file__).parents[3]
FIXTURES = ROOT / "tests/fixtures/families"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
# With key/value heads that are repeated for 3 and 8 ranks, and two files.
ONE = "llama_3"
# Ranks, the devices that carry them, and how often heads are repeated.
RANKS = [(2, 2, 1), (3, 1, 4), (8, 4, 4)]
# Float32 on both sides; logits are up to 7.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def build(source, devices=1, changes=()):
  config = base.get_config()
  config.model.update(source.section)
  config.model.dtype = "float32"
  config.parallel.tensor = source.ranks
  config.update_from_flattened_dict(dict(changes))
  return experiments.build(config, {"tensor": devices})


def convert(folder, to, ranks=1, devices=1, changes=()):
  source = open_source(folder, ranks)
  experiment = build(source, devices, changes)
  return experiment, huggingface.write_run(source, experiment, to)


def restore(experiment, folder):
  """The parameters as an evaluation reads them."""
  checkpointer = Checkpointer(folder, experiment.program)
  abstract = experiment.abstract_state()
  params, outer, *_ = checkpointer.restore_params(
    abstract.params, abstract.outer
  )
  checkpointer.close()
  return experiment.make_export()(params, outer)


def compute_logits(experiment, params, tokens):
  """Logits [B, T, vocabulary], joined from those of all ranks."""
  program = experiment.program
  mapped = jax.shard_map(
    program.model.logits, mesh=program.layout.mesh,
    in_specs=(program.specs, P()), out_specs=P("tensor"),
  )
  by_rank = jax.jit(mapped)(params, tokens)  # [R, B, T, V]
  joined = np.moveaxis(np.asarray(by_rank), 0, 2).reshape(*tokens.shape, -1)
  return joined[..., : program.model.config.vocab_size]


def expect_reference(family, experiment, folder):
  expected = np.load(FIXTURES / family / "logits.npz")
  params = restore(experiment, folder)
  logits = compute_logits(experiment, params, expected["tokens"])
  np.testing.assert_allclose(logits, expected["logits"], **TOLERANCE)


def read_all(folder):
  """All tensors of a folder as (dtype, shape, bytes) by name."""
  found, wrong = tensors.find(folder)
  assert not wrong
  return {
    name: (x.dtype, x.shape, tensors.read(x, name).tobytes())
    for name, x in found.items()
  }


def expect_round_trip(family, experiment, run, folder):
  huggingface.write_published(experiment, run, folder)
  assert read_all(folder) == read_all(FIXTURES / family)
  configs = [json.loads((x / "config.json").read_text())
             for x in (folder, FIXTURES / family)]
  assert configs[0] == configs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_the_reference_does(family, tmp_path):
  experiment, _ = convert(FIXTURES / family, tmp_path / "run")
  expect_reference(family, experiment, tmp_path / "run")
  expect_round_trip(family, experiment, tmp_path / "run", tmp_path / "back")


@pytest.mark.parametrize(("ranks", "devices", "repeats"), RANKS)
def test_any_ranks_compute_the_same(ranks, devices, repeats, tmp_path):
  experiment, made = convert(FIXTURES / ONE, tmp_path / "run", ranks, devices)
  expect_reference(ONE, experiment, tmp_path / "run")
  expect_round_trip(ONE, experiment, tmp_path / "run", tmp_path / "back")
  # 2 layers, keys and values, heads of 4 channels in float32; 3 ranks have 3
  # heads each, of which one is padding.
  heads = {2: 2, 3: 9, 8: 8}[ranks]
  assert made.kv_heads == (2, 2 * repeats)
  assert made.cache_bytes == (2 * 2 * 2 * 4 * 4, 2 * 2 * heads * 4 * 4)


def test_one_rank_s_private_channels_are_the_dense_model_s(tmp_path):
  """At p < 1 the weights are the same; only what is summed differs."""
  experiment, _ = convert(
    FIXTURES / ONE, tmp_path / "run", 2, changes={"sync.p": 0.5}
  )
  with pytest.raises(AssertionError):
    expect_reference(ONE, experiment, tmp_path / "run")
  dense, _ = convert(FIXTURES / ONE, tmp_path / "dense", 2)
  chex.assert_trees_all_equal(
    restore(experiment, tmp_path / "run"), restore(dense, tmp_path / "dense")
  )
  with pytest.raises(ValueError, match=r"sync.p=0.5 on 2 tensor ranks"):
    huggingface.write_published(experiment, tmp_path / "run", tmp_path / "x")
  assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("algorithm", ["data_parallel", "diloco"])
def test_a_run_of_ours_is_published_and_read_again(algorithm, tmp_path):
  """Also where no worker's parameters are the run's, and these are sharded."""
  config = tiny.get_config("test")
  config.model.update({"num_heads": 8, "num_kv_heads": 4, "ffn_width": 43,
                       "vocab_size": 299, "tied_embeddings": True})
  config.parallel.tensor = 4
  if algorithm == "diloco":
    config.parallel.update({"worker": 2, "data": 2})
    config.zero.scheme = "zero3"
    config.outer = tree.defaults("outer", algorithm)
  ours = experiments.build(config, {})
  state = ours.init_state()
  checkpointer = Checkpointer(tmp_path / "run", ours.program, keep=1)
  checkpointer.save(state, {})
  checkpointer.close()
  (tmp_path / "run/config.json").write_text(config.to_json())
  huggingface.write_published(
    ours, tmp_path / "run", tmp_path / "out", shard_bytes=30_000
  )
  files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
  assert len(files) > 3
  assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
  arrays = [safetensors.numpy.load_file(tmp_path / "out" / f) for f in files]
  assert sum(x.size for part in arrays for x in part.values()) == (
    ours.program.model.num_params
  )
  again, _ = convert(tmp_path / "out", tmp_path / "again", 4)
  chex.assert_trees_all_equal(
    restore(again, tmp_path / "again"),
    to_whole(ours.program, ours.make_export()(state.params, state.outer)),
  )


def test_another_dtype_is_rounded_to(tmp_path):
  experiment, _ = convert(FIXTURES / "mistral_linear", tmp_path / "run")
  huggingface.write_published(
    experiment, tmp_path / "run", tmp_path / "half", dtype="bfloat16"
  )
  config = json.loads((tmp_path / "half/config.json").read_text())
  assert config["torch_dtype"] == "bfloat16"
  found, _ = tensors.find(FIXTURES / "mistral_linear")
  rounded, _ = tensors.find(tmp_path / "half")
  for name, x in found.items():
    values = tensors.read(rounded[name], name)
    expected = tensors.read(x, name).astype(values.dtype)
    assert expected.dtype.name == "bfloat16"
    np.testing.assert_array_equal(values, expected)


def test_the_tokenizer_goes_with_the_weights(tmp_path):
  folder = tmp_path / "from"
  shutil.copytree(FIXTURES / "llama_2", folder)
  texts = llama_files() | {"vocab.json": "{}"}
  for name, text in texts.items():
    (folder / name).write_text(text)
  config = json.loads((folder / "config.json").read_text())
  size = json.loads((folder / "config.json").read_text())["vocab_size"]
  assert LibraryTokenizer("x", llama_files(), "x").vocab_size > size
  with pytest.raises(ValueError, match=f"but vocab_size={size}: it belongs"):
    open_source(folder, 1)
  arrays = safetensors.numpy.load_file(folder / "model.safetensors")
  for name in ("model.embed_tokens.weight", "lm_head.weight"):
    arrays[name] = np.resize(arrays[name], (500, 32))
  safetensors.numpy.save_file(arrays, folder / "model.safetensors")
  config["vocab_size"] = 500
  (folder / "config.json").write_text(json.dumps(config))
  experiment, made = convert(folder, tmp_path / "run")
  kept = tokenizer.load(tmp_path / "run")
  assert kept.name == made.tokenizer
  assert kept.identity == LibraryTokenizer("x", llama_files(), "x").identity
  huggingface.write_published(experiment, tmp_path / "run", tmp_path / "back")
  for name in (*texts, "generation_config.json"):
    assert (tmp_path / "back" / name).read_bytes() == (
      (folder / name).read_bytes()
    )


def test_a_table_that_is_published_twice_is_so_again(tmp_path):
  """A tied head that is there, as some publish it."""
  folder = tmp_path / "from"
  shutil.copytree(FIXTURES / "qwen2", folder)
  path = folder / "model.safetensors"
  arrays = safetensors.numpy.load_file(path)
  arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
  arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, "f4")
  safetensors.numpy.save_file(arrays, path)
  experiment, _ = convert(folder, tmp_path / "run")
  huggingface.write_published(experiment, tmp_path / "run", tmp_path / "back")
  expected = read_all(folder)
  del expected["model.layers.0.self_attn.rotary_emb.inv_freq"]
  assert read_all(tmp_path / "back") == expected


def test_repeated_heads_that_differ_are_not_merged():
  part = layout.Part("k", (4, 3), 0, 4, transposed=True, repeats=2, unit=2)
  slot = layout.Slot(("k",), (part,), 0, 2)
  dense = np.arange(12.0).reshape(4, 3)
  joined = layout.join(slot, [dense])
  assert joined.shape == (2, 3, 4)
  np.testing.assert_array_equal(layout.take_apart(slot, joined)[0], dense)
  joined[1, 0, 3] += 1
  with pytest.raises(ValueError, match="repeated 2 times are no longer equal"):
    layout.take_apart(slot, joined)


# What is on the disk while and after it is written ---------------------------


def test_nothing_half_written_stays(tmp_path):
  experiment, _ = convert(FIXTURES / ONE, tmp_path / "run", 2)
  source, calls = open_source(FIXTURES / ONE, 2), []

  def advance():
    calls.append(0)
    if len(calls) % 7 == 0:
      raise KeyboardInterrupt

  new = tmp_path / "new"
  with pytest.raises(KeyboardInterrupt):
    huggingface.write_run(source, experiment, new, advance)
  with pytest.raises(KeyboardInterrupt):
    huggingface.write_published(
      experiment, tmp_path / "run", new, advance=advance
    )
  assert len(calls) == 14
  assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_has_its_name_when_it_is_whole(tmp_path):
  """What a killed conversion left is no run, and does not stay."""
  (tmp_path / ".run.partial/checkpoints/0").mkdir(parents=True)
  source, seen = open_source(FIXTURES / ONE, 1), []

  def advance():
    seen.append((tmp_path / "run").exists())

  experiment = build(source)
  huggingface.write_run(source, experiment, tmp_path / "run", advance)
  assert seen == [False] * source.num_tensors
  assert [path.name for path in tmp_path.iterdir()] == ["run"]
  names = {path.name for path in (tmp_path / "run").iterdir()}
  assert names == {"config.json", "checkpoints", huggingface.ORIGIN,
                   tokenizer.FOLDER}
  with pytest.raises(FileExistsError, match="run exists"):
    huggingface.write_run(source, experiment, tmp_path / "run")


MEMORY = """
import pathlib, resource, sys
from tests.caatnet.interop import huggingface_test as test
folder = pathlib.Path(sys.argv[1])
test.convert(test.FIXTURES / "mistral", folder / "small")  # what libraries take
def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
experiment, made = test.convert(folder / "large", folder / "run", 2)
between = peak()
test.huggingface.write_published(experiment, folder / "run", folder / "back")
print(made.published_bytes, between - before, peak() - between)
"""


def test_memory_holds_a_small_part_of_the_model(tmp_path):
  """Of tensors of up to 1.4 MB; half of what is measured is code."""
  fields = json.loads((FIXTURES / "mistral/config.json").read_text())
  fields |= {"hidden_size": 512, "intermediate_size": 1408,
             "num_hidden_layers": 40}
  folder = tmp_path / "large"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(fields))
  section, _ = families.parse(fields)
  shapes = {
    name: ("bfloat16", part.shape)
    for name, part in layout.published(layout.slots(make_config(section), 1))
  }
  noise = np.random.default_rng(0).bytes(2 * 512 * 1408)
  with tensors.Writer(folder, shapes) as writer:
    for name, (dtype, shape) in shapes.items():
      values = np.frombuffer(noise, jax.numpy.dtype(dtype), np.prod(shape))
      writer.write(name, values.reshape(shape))
  ended = subprocess.run(
    [sys.executable, "-c", MEMORY, tmp_path], cwd=ROOT, check=True,
    capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  published, read, written = map(int, ended.stdout.split())
  assert published > 170e6
  assert read < published / 3
  assert written < published / 3


def test_a_checkpoint_in_slices_is_read_by_rows_and_places(tmp_path):
  values = np.arange(24.0, dtype="f4").reshape(1, 3, 2, 4)
  for name, chunk in (("by_row", (1, 1, 1, 4)), ("whole", (1, 3, 2, 4))):
    sliced = slices.Sliced(
      values.shape, values.dtype, chunk,
      lambda: (((0, row), values[0, row]) for row in range(3)),
    )
    (tmp_path / name).mkdir()
    slices.write_params(tmp_path / name, 4, {"x": sliced})
    found = slices.open_params(tmp_path / name, 4, {"x": 0})["x"]
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    np.testing.assert_array_equal(list(found.rows((0,))), values[0])
    np.testing.assert_array_equal(found.at((0, 2)), values[0, 2])


def test_a_dtype_in_which_weights_overflow_is_refused():
  values = np.array([1.0, -1e6, np.inf], np.float32)
  kept = huggingface._cast(values, "bfloat16", "w")
  np.testing.assert_array_equal(np.isinf(kept), [False, False, True])
  with pytest.raises(ValueError, match=r"float16: w has 1e\+06, which over"):
    huggingface._cast(values, "float16", "w")
