"""Published checkpoints: logits equal the reference, and exports are equal.

The checkpoints of `tests/fixtures/families` and their logits were made by
`tests/fixtures/make_families.py`.
"""

import contextlib
import dataclasses
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
from caatnet.data.tokenizers import LibraryTokenizer
from caatnet.interop import families, huggingface, layout, tensors
from caatnet.interop.source import make_config, open_published_model
from caatnet.schema import tree
from caatnet.train import tokenizer
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.checkpoint.save import Checkpointer
from configs.caatnet import base, tiny
from configs.images import tiny as images_tiny
from tests.caatnet.data.small_tokenizers import llama_files

ROOT = pathlib.Path(__file__).parents[3]
FIXTURES = ROOT / "tests/fixtures/families"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
# Has two files, and key/value heads that are repeated for 6 and 8 ranks.
ONE = "llama_3"
# (ranks, devices, repeats of key/value heads).
RANKS = [(2, 2, 1), (3, 1, 1), (6, 1, 2), (8, 4, 4)]
# Both sides compute in float32; logits are up to 7.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def build(source, devices=1, changes=()):
  config = base.get_config()
  config.model.update(source.section)
  config.model.dtype = "float32"
  config.data.seq_len = config.model.max_positions
  config.parallel.tensor = source.ranks
  config.update_from_flattened_dict(dict(changes))
  return experiments.build(config, {"tensor": devices})


def convert(folder, to, ranks=1, devices=1, changes=()):
  source = open_published_model(folder, ranks)
  experiment = build(source, devices, changes)
  return experiment, huggingface.write_run(source, experiment, to)


def restore(experiment, folder):
  """Returns the parameters as an evaluation reads them."""
  checkpointer = Checkpointer(folder, experiment.program)
  abstract = experiment.abstract_state()
  params, outer, *_ = checkpointer.restore_params(
    abstract.params, abstract.outer
  )
  checkpointer.close()
  return experiment.make_export_params()(params, outer)


def compute_logits(experiment, params, tokens):
  """Returns logits [B, T, vocabulary], joined over all ranks."""
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
  """Returns all tensors of a folder as (dtype, shape, bytes) by name."""
  found, wrong = tensors.find(folder)
  assert not wrong
  return {
    name: (x.dtype, x.shape, tensors.read(x, name).tobytes())
    for name, x in found.items()
  }


def expect_round_trip(family, experiment, run, folder):
  huggingface.write_published_model(experiment, run, folder, step=0)
  assert read_all(folder) == read_all(FIXTURES / family)
  configs = [json.loads((x / "config.json").read_text())
             for x in (folder, FIXTURES / family)]
  assert configs[0] == configs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_computes_the_reference_logits(family, tmp_path):
  experiment, _ = convert(FIXTURES / family, tmp_path / "run")
  expect_reference(family, experiment, tmp_path / "run")
  expect_round_trip(family, experiment, tmp_path / "run", tmp_path / "back")


@pytest.mark.parametrize(("ranks", "devices", "repeats"), RANKS)
def test_any_number_of_ranks_computes_the_reference_logits(
  ranks, devices, repeats, tmp_path
):
  experiment, made = convert(FIXTURES / ONE, tmp_path / "run", ranks, devices)
  expect_reference(ONE, experiment, tmp_path / "run")
  expect_round_trip(ONE, experiment, tmp_path / "run", tmp_path / "back")
  # 2 layers, keys and values, heads of 4 channels in float32; every rank has
  # one head, of which 1 of 3 and 2 of 6 are padding.
  heads = ranks
  assert made.kv_heads == (2, 2 * repeats)
  assert made.cache_bytes == (2 * 2 * 2 * 4 * 4, 2 * 2 * heads * 4 * 4)


def test_weights_at_p_below_1_are_those_of_the_dense_model(tmp_path):
  """Equal weights; only the synchronised channels differ."""
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
    huggingface.write_published_model(
      experiment, tmp_path / "run", tmp_path / "x"
    )
  assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("algorithm", ["data_parallel", "diloco"])
def test_trained_run_is_published_and_read_again(algorithm, tmp_path):
  """Also with DiLoCo (outer parameters are published) and sharded by ZeRO-3.

  The last of four ranks has only padding of the heads.
  """
  config = tiny.get_config("test")
  config.model.update({"num_heads": 6, "num_kv_heads": 3, "head_width": 4,
                       "ffn_width": 43, "vocab_size": 299,
                       "tied_embeddings": True})
  config.parallel.tensor = 4
  if algorithm == "diloco":
    config.parallel.update({"worker": 2, "data": 2})
    config.zero.scheme = "zero3"
    config.outer = tree.defaults("outer", algorithm)
  ours = experiments.build(config, {})
  # Differs between the workers' and the outer parameters.
  state = ours.init_state()
  state = state._replace(params=jax.tree.map(lambda x: 2 * x, state.params))
  checkpointer = Checkpointer(tmp_path / "run", ours.program, keep=1)
  checkpointer.save(state, {})
  checkpointer.close()
  (tmp_path / "run/config.json").write_text(config.to_json())
  huggingface.write_published_model(
    ours, tmp_path / "run", tmp_path / "out", shard_bytes=20_000
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
    to_whole(
      ours.program, ours.make_export_params()(state.params, state.outer)
    ),
  )
  one, _ = convert(tmp_path / "out", tmp_path / "one", 1)
  huggingface.write_published_model(one, tmp_path / "one", tmp_path / "back")
  assert read_all(tmp_path / "back") == read_all(tmp_path / "out")


def test_summary_of_a_conversion_is_a_table(tmp_path):
  experiment, made = convert(FIXTURES / ONE, tmp_path / "run", 6)
  count = experiment.program.model.num_params
  assert open_published_model(FIXTURES / ONE, 6).num_tensors == (
    huggingface.num_tensors(experiment)
  )
  published, _ = tensors.find(FIXTURES / ONE)
  size = sum(np.prod(x.shape) for x in published.values())
  assert size < count  # repeated key/value heads
  assert made.rows == [
    ["parameters", f"{size:,}", ""],
    ["bytes of tensors", f"{2 * size:,}", ""],
    ["tokenizer", "", "bytes"],
    ["tensor ranks", "", "6"],
    ["key/value heads", "2", "4"],
    ["bytes of keys and values per token", "128", "384"],
  ]
  back = huggingface.write_published_model(
    experiment, tmp_path / "run", tmp_path / "back"
  )
  assert back == dataclasses.replace(made, folder=tmp_path / "back")


def test_only_dense_transformers_have_a_published_form():
  source = open_published_model(FIXTURES / ONE, 1)
  experiment = build(source, changes={"sync.p": 0.5})  # of one rank
  assert huggingface.num_tensors(experiment) == source.num_tensors
  other = experiments.build(images_tiny.get_config("data_parallel,test"), {})
  with pytest.raises(ValueError, match=r"only config.model.name='transformer'"):
    huggingface.num_tensors(other)


def data_sizes(folder):
  """Returns the sizes of a folder's files without their headers."""
  sizes = {}
  for path in sorted(folder.glob("*.safetensors")):
    text = path.read_bytes()
    header = text[8 : 8 + int.from_bytes(text[:8], "little")]
    assert len(header) % 8 == 0
    assert len(header) - len(header.rstrip()) < 8
    sizes[path.name] = len(text) - 8 - len(header)
  return sizes


@pytest.mark.parametrize(("limit", "sizes"), [
  (16, [16, 8, 40, 8]), (17, [16, 8, 40, 8]), (15, [8, 8, 8, 40, 8]),
  (23, [16, 8, 40, 8]), (24, [24, 40, 8]), (72, [72]), (1, [8, 8, 8, 40, 4, 4]),
])
def test_files_are_filled_in_order_up_to_their_limit(limit, sizes, tmp_path):
  names = ["a", "bb", "ccc", "large", "x" * 9, "y"]
  shapes = {
    name: ("float32", (count,))
    for name, count in zip(names, (2, 2, 2, 10, 1, 1), strict=True)
  }
  with tensors.Writer(tmp_path, shapes, limit) as writer:
    for name in reversed(names):
      writer.write(name, np.full(shapes[name][1], len(name), "f4"))
  found = data_sizes(tmp_path)
  assert list(found.values()) == sizes
  count = len(sizes)
  assert list(found) == (
    [tensors.SINGLE_FILE] if count == 1 else
    [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
  )
  if count > 1:
    index = json.loads((tmp_path / tensors.INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 72}
  listed, wrong = tensors.find(tmp_path)
  assert not wrong
  assert listed.keys() == shapes.keys()
  for name, x in listed.items():
    assert (tensors.read(x, name) == len(name)).all()


@pytest.mark.parametrize(("count", "num_files"), [(10**9, 1), (10**9 + 1, 2)])
def test_files_have_5_gigabytes_by_default(count, num_files, tmp_path):
  """Writes headers only."""
  shapes = {"a": ("float32", (count,)), "b": ("float16", (5 * 10**8,))}
  with contextlib.suppress(KeyboardInterrupt), tensors.Writer(tmp_path, shapes):
    raise KeyboardInterrupt
  assert len(list(tmp_path.glob("*.safetensors"))) == num_files


def test_published_weights_are_rounded_to_another_dtype(tmp_path):
  experiment, _ = convert(FIXTURES / "mistral_linear", tmp_path / "run")
  huggingface.write_published_model(
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


def test_tokenizer_is_published_with_the_weights(tmp_path):
  folder = tmp_path / "from"
  shutil.copytree(FIXTURES / "llama_2", folder)
  texts = llama_files() | {"vocab.json": "{}"}
  for name, text in texts.items():
    (folder / name).write_text(text)
  config = json.loads((folder / "config.json").read_text())
  size = json.loads((folder / "config.json").read_text())["vocab_size"]
  num_tokens = LibraryTokenizer("x", llama_files(), "x").vocab_size
  assert num_tokens > size
  with pytest.raises(ValueError, match=f"but vocab_size={size}; use the"):
    open_published_model(folder, 1)
  arrays = safetensors.numpy.load_file(folder / "model.safetensors")
  for name in ("model.embed_tokens.weight", "lm_head.weight"):
    arrays[name] = np.resize(arrays[name], (num_tokens, 32))
  safetensors.numpy.save_file(arrays, folder / "model.safetensors")
  config["vocab_size"] = num_tokens
  (folder / "config.json").write_text(json.dumps(config))
  experiment, made = convert(folder, tmp_path / "run")
  kept = tokenizer.load(tmp_path / "run")
  assert kept.name == made.tokenizer
  assert kept.identity == LibraryTokenizer("x", llama_files(), "x").identity
  huggingface.write_published_model(
    experiment, tmp_path / "run", tmp_path / "back"
  )
  for name in (*texts, "generation_config.json"):
    assert (tmp_path / "back" / name).read_bytes() == (
      (folder / name).read_bytes()
    )


def test_stored_copy_of_a_tied_head_is_published_again(tmp_path):
  """Some publishers store the tied head explicitly."""
  folder = tmp_path / "from"
  shutil.copytree(FIXTURES / "qwen2", folder)
  path = folder / "model.safetensors"
  arrays = safetensors.numpy.load_file(path)
  arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
  arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, "f4")
  safetensors.numpy.save_file(arrays, path)
  experiment, _ = convert(folder, tmp_path / "run")
  huggingface.write_published_model(
    experiment, tmp_path / "run", tmp_path / "back"
  )
  expected = read_all(folder)
  del expected["model.layers.0.self_attn.rotary_emb.inv_freq"]
  assert read_all(tmp_path / "back") == expected


def test_repeated_heads_that_differ_are_not_merged():
  part = layout.PublishedTensor(
    "k", (4, 3), 0, 4, transposed=True, repeats=2, unit=2
  )
  slot = layout.MappedParameter(("k",), (part,), 0, 2)
  dense = np.arange(12.0).reshape(4, 3)
  joined = layout.join(slot, [dense])
  assert joined.shape == (2, 3, 4)
  np.testing.assert_array_equal(layout.take_apart(slot, joined)[0], dense)
  joined[1, 0, 3] += 1
  with pytest.raises(ValueError, match="2 copies are no longer equal"):
    layout.take_apart(slot, joined)


# Files during and after writing ----------------------------------------------


def test_interrupted_write_leaves_no_folder(tmp_path):
  experiment, _ = convert(FIXTURES / ONE, tmp_path / "run", 2)
  source, calls = open_published_model(FIXTURES / ONE, 2), []

  def advance():
    calls.append(0)
    if len(calls) % 7 == 0:
      raise KeyboardInterrupt

  new = tmp_path / "new"
  with pytest.raises(KeyboardInterrupt):
    huggingface.write_run(source, experiment, new, advance)
  with pytest.raises(KeyboardInterrupt):
    huggingface.write_published_model(
      experiment, tmp_path / "run", new, advance=advance
    )
  assert len(calls) == 14
  assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_run_gets_its_name_when_it_is_complete(tmp_path):
  """Removes the partial folder of a killed conversion."""
  (tmp_path / ".run.partial/checkpoints/0").mkdir(parents=True)
  source, seen = open_published_model(FIXTURES / ONE, 1), []

  def advance():
    seen.append((tmp_path / "run").exists())

  experiment = build(source)
  huggingface.write_run(source, experiment, tmp_path / "run", advance)
  assert seen == [False] * source.num_tensors
  assert [path.name for path in tmp_path.iterdir()] == ["run"]
  names = {path.name for path in (tmp_path / "run").iterdir()}
  assert names == {"config.json", "checkpoints", huggingface.ORIGIN_FILE,
                   tokenizer.FOLDER}
  with pytest.raises(FileExistsError, match="run exists"):
    huggingface.write_run(source, experiment, tmp_path / "run")


MEMORY = """
import pathlib, resource, sys
from tests.caatnet.interop import huggingface_test as test
folder = pathlib.Path(sys.argv[1])
test.convert(test.FIXTURES / "mistral", folder / "small")  # memory of libraries
def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
experiment, made = test.convert(folder / "large", folder / "run", 2)
between = peak()
run, back = folder / "run", folder / "back"
test.huggingface.write_published_model(experiment, run, back)
print(made.published_bytes, between - before, peak() - between)
"""


def test_memory_holds_a_small_part_of_the_model(tmp_path):
  """Tensors are up to 1.4 MB; half of the measured memory is code."""
  fields = json.loads((FIXTURES / "mistral/config.json").read_text())
  fields |= {"hidden_size": 512, "intermediate_size": 1408,
             "num_hidden_layers": 40}
  folder = tmp_path / "large"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(fields))
  section, _ = families.parse_published_config(fields)
  shapes = {
    name: ("bfloat16", part.shape)
    for name, part in layout.published_tensors(
      layout.map_parameters(make_config(section), 1)
    )
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


def test_dtype_in_which_weights_overflow_is_refused():
  values = np.array([1.0, -1e6, np.inf], np.float32)
  kept = huggingface._cast(values, "bfloat16", "w")
  np.testing.assert_array_equal(np.isinf(kept), [False, False, True])
  with pytest.raises(ValueError, match=r"float16: w has 1e\+06, which over"):
    huggingface._cast(values, "float16", "w")
