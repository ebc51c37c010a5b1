"""Errors of published folders: all problems in one message."""

import json
import os
import shutil
import struct
import sys

import numpy as np
import pytest
import safetensors.numpy

from caatnet.interop import families, huggingface, tensors
from caatnet.interop.source import (
  _abbreviate_names,
  make_config,
  open_published_model,
)
from tests.caatnet.interop.huggingface_test import FIXTURES, convert

ONE_FILE = "model.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
  shutil.copytree(FIXTURES / "mistral", tmp_path / "from")
  return tmp_path / "from"


@pytest.fixture
def sharded(tmp_path):
  shutil.copytree(FIXTURES / "llama_3", tmp_path / "from")
  return tmp_path / "from"


def edit_config(folder, **changes):
  """Changes keys of the config; None removes a key."""
  path = folder / "config.json"
  config = json.loads(path.read_text()) | changes
  config = {key: x for key, x in config.items() if x is not None}
  path.write_text(json.dumps(config))


def edit_tensors(folder, edit):
  arrays = safetensors.numpy.load_file(folder / ONE_FILE)
  edit(arrays)
  safetensors.numpy.save_file(arrays, folder / ONE_FILE)


def edit_header(folder, edit):
  """Changes the header without changing the bytes of the tensors."""
  path = folder / ONE_FILE
  text = path.read_bytes()
  end = 8 + struct.unpack("<Q", text[:8])[0]
  header = json.loads(text[8:end])
  header = edit(header) or header
  if not isinstance(header, bytes):
    header = json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(header)) + header + text[end:])


def expect(folder, message, ranks=1):
  with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
    open_published_model(folder, ranks)
  assert "\n" not in str(error.value)
  return str(error.value)


# The file ------------------------------------------------------------------


def shift(header):
  start, stop = header[Q]["data_offsets"]
  header[Q]["data_offsets"] = [start - 2, stop - 2]


def lie_about_shape(header):
  header[Q]["shape"][0] += 1


def lie_about_dtype(header):
  header[Q]["dtype"] = "F32"


def name_twice(header):
  text = json.dumps(header)
  return text.replace('{"', f'{{"{Q}": {json.dumps(header[Q])}, "', 1).encode()


@pytest.mark.parametrize(
  ("edit", "message"),
  [
    (shift, "invalid offset for tensor"),
    (lie_about_shape, "invalid shape, data type, or offset"),
    (lie_about_dtype, "invalid shape, data type, or offset"),
    (name_twice, rf"{Q}: duplicate keys"),
    (lambda header: b"{}", "not fully covered"),
    (lambda header: b"weights", "invalid JSON in header"),
    (lambda header: header.update({"x": {"dtype": "F99"}}), "invalid JSON"),
  ],
)
def test_invalid_header_is_named(folder, edit, message):
  edit_header(folder, edit)
  expect(folder, f"{ONE_FILE} is damaged.*{message}")


@pytest.mark.parametrize("size", [0, 7, 100, -2])
def test_truncated_file_is_named(folder, size):
  path = folder / ONE_FILE
  path.write_bytes(path.read_bytes()[:size])
  expect(folder, f"cannot be converted: .*{ONE_FILE} is damaged")


def test_file_damaged_after_its_check_is_named(folder, tmp_path):
  """Truncates it between the check of its header and its last tensor."""
  source = open_published_model(folder, 1)
  text = (folder / ONE_FILE).read_bytes()
  (folder / ONE_FILE).write_bytes(text[:-2])
  name, tensor = next(iter(source.tensors.items()))
  with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
    tensors.read(tensor, name)


def test_pickled_weights_are_not_read(folder):
  (folder / ONE_FILE).rename(folder / "pytorch_model.bin")
  expect(folder, "only pytorch_model.bin, which is pickled")
  (folder / "pytorch_model.bin").unlink()
  expect(folder, "there is no such file")


@pytest.mark.parametrize(
  ("place", "message"),
  [
    ("gone.safetensors", "names 'gone.safetensors', which is not in"),
    ("../x.safetensors", "names '../x.safetensors', which is not in"),
    ("model-00001-of-00002.safetensors", "00001-of-00002.safetensors lacks "
     r"model.norm.weight.*model.norm.weight is in .*but not according"),
  ],
)
def test_invalid_index_is_named(sharded, place, message):
  shutil.copy(
    sharded / "model-00001-of-00002.safetensors",
    sharded.parent / "x.safetensors",
  )
  path = sharded / tensors.INDEX_FILE
  index = json.loads(path.read_text())
  index["weight_map"]["model.norm.weight"] = place
  path.write_text(json.dumps(index))
  expect(sharded, message)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": [1]}'])
def test_damaged_index_is_named(sharded, text):
  (sharded / tensors.INDEX_FILE).write_text(text)
  expect(sharded, f"{tensors.INDEX_FILE} is damaged")


def test_unsupported_tokenizer_is_refused_not_ignored(folder):
  (folder / "tokenizer.model").write_bytes(b"sentences")
  expect(folder, "cannot be converted: .*tokenizer.model")


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "ll', "[" * 10**5])
def test_damaged_config_is_named(folder, text):
  (folder / "config.json").write_text(text)
  expect(folder, "config.json is damaged")


# Tensors and config ----------------------------------------------------------


def test_all_problems_are_in_one_error(folder):
  def edit(arrays):
    for layer in (0, 1):
      del arrays[f"model.layers.{layer}.mlp.up_proj.weight"]
      arrays[f"model.layers.{layer}.self_attn.q_proj.bias"] = np.ones(32, "f4")
    arrays["model.norm.weight"] = np.ones((32, 1), "f4")
    arrays["lm_head.weight"] = np.ones((96, 32), "i4")
    arrays["model.layers.1.mlp.gate_proj.weight_scale"] = np.ones(1, "f4")
    arrays["model.layers.1.side.layers.7.weight"] = np.ones(1, "f4")
    del arrays["model.layers.1.input_layernorm.weight"]

  edit_tensors(folder, edit)
  edit_config(folder, attention_bias=True)
  message = expect(folder, "cannot be converted: ")
  assert message.partition(": ")[2].split("; ") == [
    "attention_bias=True: False only",
    "missing: model.layers.1.input_layernorm.weight, "
    "model.layers.{0-1}.mlp.up_proj.weight",
    "not known: model.layers.1.mlp.gate_proj.weight_scale, "
    "model.layers.{0-1}.self_attn.q_proj.bias, "
    "model.layers.1.side.layers.7.weight",
    "model.norm.weight has shape [32, 1], expected [32]",
    "lm_head.weight in I32, which is not one of float32, bfloat16, float16",
  ]


def test_tied_head_that_differs_is_refused(folder):
  edit_config(folder, tie_word_embeddings=True)
  expect(folder, "lm_head.weight differs from model.embed_tokens.weight")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "mixtral"}, "'mixtral' must be one of llama, mistral"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': 'silu' only"),
    ({"mlp_bias": True}, "mlp_bias=True: False only"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.*not supp"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0},
      "rope_parameters": None}, "of type 'yarn': default, linear and llama3"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}},
     "'factor': 2.0} is not rope_parameters="),
    ({"tie_word_embeddings": "false"}, "='false' must be true or false"),
    ({"tie_word_embeddings": 1}, "=1 must be true or false"),
    ({"rope_theta": 10**400}, "rope_theta=10+... must be a positive number"),
    ({"layer_types": ["chunked_attention"] * 2}, "must be a list of full"),
    ({"num_hidden_layers": 10**8}, "=100000000 must be at most 16384"),
    ({"num_hidden_layers": 16384}, "=16384, but the files have"),
    ({"num_attention_heads": 10**30}, "must be at most 16384"),
    ({"hidden_size": 2**24 + 1}, "hidden_size=16777217 must be at most"),
    ({"rope_scaling": {"type": "linear", "factor": 1e300}},
     "with a factor of 1e.300 must be at most 2147483647"),
    ({"rope_parameters": {"full": {"rope_type": "default"}}}, "only one form"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2}},
     "rope_parameters.low_freq_factor is missing.*high_freq.*original_max"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
     "needs a finite factor >= 1"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "1.0 only"),
    ({"layer_types": ["full_attention", "sliding_attention"]},
     "layers differ.*one sliding_window for all layers"),
    ({"hidden_size": None}, "hidden_size is missing and must be a positive "
     "integer$"),
    ({"vocab_size": "many"}, "vocab_size='many' must be a positive integer$"),
    ({"vocab_size": 0}, "vocab_size=0 must be a positive integer$"),
    ({"hidden_act": "g" * 59}, rf"hidden_act='{'g' * 56}\.\.\.: 'silu' only"),
    ({"hidden_act": "g" * 58}, rf"hidden_act='{'g' * 58}': 'silu' only"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": None,
      "max_window_layers": "all"}, "max_window_layers='all' must be an int"),
    ({"num_hidden_layers": 22}, "num_hidden_layers=22, but the files have 21 "
     "tensors in all"),
    ({"num_hidden_layers": 21}, r"missing: model.layers.\{2-20\}.input_layer"),
    ({"max_position_embeddings": 2.5}, "max_position_embeddings=2.5 must be"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True must be a positive"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a positive number"),
    ({"rope_theta": -1.0}, "rope_theta=-1.0 must be a positive number"),
    ({"num_key_value_heads": 3}, "num_kv_heads=3 does not divide"),
    ({"head_dim": 5}, "head_width=5 .*must be even"),
    ({"num_hidden_layers": 3},
     r"missing: model.layers.2.input_layernorm.weight, model.layers.2.mlp"),
    ({"vocab_size": 97}, r"embed_tokens.weight has shape \[96, 32\], expect"),
  ],
)
def test_unsupported_config_is_named(folder, changes, message):
  edit_config(folder, **changes)
  expect(folder, f"cannot be converted: .*{message}")


def test_layers_are_listed_as_ranges():
  names = [f"model.layers.{layer}.a" for layer in (8, 0, 1, 2, 4, 7)]
  assert _abbreviate_names([*names, "x", "model.layers.3.b"]) == (
    "model.layers.{0-2,4,7-8}.a, model.layers.3.b, x"
  )


def test_dtype_of_a_run_is_that_of_the_config(folder):
  """The config precedes the tensors; the older key precedes the newer."""
  for fields, expected in (
    ({"torch_dtype": "float16", "dtype": "float32"}, "float16"),
    ({"torch_dtype": None, "dtype": "float32"}, "float32"),
    ({"dtype": None}, "bfloat16"), ({"dtype": "int8"}, "bfloat16"),
  ):
    edit_config(folder, **fields)
    assert open_published_model(folder, 1).section["dtype"] == expected
    asked = open_published_model(folder, 1, "float32")
    assert asked.section["dtype"] == "float32"
  with pytest.raises(ValueError, match="dtype='int8' must be one of"):
    open_published_model(folder, 1, "int8")


def test_context_without_a_length_has_no_limit(folder):
  assert open_published_model(folder, 1).num_positions == 64
  edit_config(folder, max_position_embeddings=None)
  assert open_published_model(folder, 1).num_positions == 2**31 - 1


def test_ranks_that_do_not_fit_are_refused(folder):
  expect(folder, "ranks=16 would leave half of.*use one of 1, 2, .*, 15", 16)


# Export ----------------------------------------------------------------------


def test_origin_of_another_model_is_refused(folder, tmp_path):
  experiment, _ = convert(folder, tmp_path / "run")
  path = tmp_path / "run" / huggingface.ORIGIN_FILE
  origin = json.loads(path.read_text())
  origin["config"]["sliding_window"] = 99
  path.write_text(json.dumps(origin))
  arguments = experiment, tmp_path / "run", tmp_path / "to"
  with pytest.raises(ValueError, match=r"another model .*\(sliding_window\)"):
    huggingface.write_published_model(*arguments)
  path.write_text("{}")
  with pytest.raises(ValueError, match=r"huggingface\.json is damaged"):
    huggingface.write_published_model(*arguments)
  path.unlink()
  with pytest.raises(FileNotFoundError, match="no checkpoint of step 7"):
    huggingface.write_published_model(*arguments, step=7)
  with pytest.raises(ValueError, match="dtype='int8' must be one of"):
    huggingface.write_published_model(*arguments, dtype="int8")
  assert {x.name for x in tmp_path.iterdir()} == {"from", "run"}


@pytest.mark.parametrize(
  ("name", "error", "message"),
  [
    ("from", FileExistsError, "from exists; remove it, or use another name"),
    ("from/a/b", ValueError, "--to=.*/from/a/b is inside --from="),
    ("from/../link/a", ValueError, "--to=.*/link/a is inside --from="),
    ("file/a/b", ValueError, "a/b cannot be written: .*/file is not a folder"),
    ("sealed/a", ValueError, "sealed/a cannot be written: .*/sealed is read"),
  ],
)
def test_invalid_target_folder_is_refused_before_writing(
  folder, tmp_path, monkeypatch, name, error, message
):
  (tmp_path / "file").touch()
  source = tmp_path / "link"
  source.symlink_to(folder)
  (tmp_path / "sealed").mkdir()
  may = os.access  # root has access to all folders
  monkeypatch.setattr(
    os, "access", lambda path, how: path.name != "sealed" and may(path, how)
  )
  with pytest.raises(error, match=message):
    huggingface.check_target(source, tmp_path / name)
  huggingface.check_target(source, tmp_path / "from_here" / "to")


def test_folder_of_neither_kind_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="neither a run's folder"):
    huggingface.is_run(tmp_path)


# Configs ---------------------------------------------------------------------

LARGEST = sys.float_info.max
LLAMA_3 = ("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"num_kv_heads": 2, "rope_scaling": LLAMA_3, "tied_embeddings": True},
    {"sliding_window": 9, "head_width": 12, "rope_scaling": ("linear", 2.0),
     "max_positions": 128},
    {"qkv_bias": True},
    {"qkv_bias": True, "sliding_window": 5},
    {"qk_norm": True, "rope_base": 1e6},
  ],
)
def test_written_config_round_trips(changes):
  section = {
    "vocab_size": 50, "width": 32, "num_layers": 3, "num_heads": 4,
    "num_kv_heads": 4, "ffn_width": 40, "head_width": 0, "qkv_bias": False,
    "qk_norm": False, "sliding_window": 0, "rope_scaling": (),
    "rope_base": 10_000.0, "norm_eps": 1e-5, "tied_embeddings": False,
    "max_positions": 64,
  } | changes
  fields = families.to_published_config(make_config(section), "float16", 64)
  fields = json.loads(json.dumps(fields))
  assert families.parse_published_config(fields) == (section, [])
  # The run's own length without a published one.
  trained = families.to_published_config(
    make_config(section | {"max_positions": 0}), "float16", 32
  )
  assert trained["max_position_embeddings"] == 32


def test_written_config_has_the_keys_of_its_family():
  section = families.parse_published_config(
    json.loads((FIXTURES / "qwen2/config.json").read_text())
  )[0]
  for window in (0, 5):
    config = make_config(section | {"sliding_window": window})
    fields = families.to_published_config(config, "float16", 64)
    assert fields["architectures"] == ["Qwen2ForCausalLM"]
    assert (fields["torch_dtype"], fields["max_position_embeddings"]) == (
      "float16", 64
    )
    assert fields["sliding_window"] == (window or None)
    assert fields["use_sliding_window"] is bool(window)
    assert fields["max_window_layers"] == 0  # all layers have the window
    mistral = make_config(section | {
      "sliding_window": window, "qkv_bias": False,
    })
    fields = families.to_published_config(mistral, "float16", 64)
    assert fields["model_type"] == ("mistral" if window else "llama")
    assert "use_sliding_window" not in fields
    assert ("sliding_window" in fields) == bool(window)


def test_invalid_numbers_are_recorded_and_count_as_1():
  reader = families._Reader({"a": 0, "b": "x"}, "rope.")
  assert [reader.count("a"), reader.count("a", 7), reader.count("c")] == (
    [1, 7, 1]
  )
  assert [reader.number("b"), reader.number("b", 3.0), reader.number("c")] == (
    [1.0, 3.0, 1.0]
  )
  assert reader.failed
  assert reader.wrong[0] == "rope.a=0 must be a positive integer"
  assert reader.wrong[5] == "rope.c is missing and must be a positive number"
  assert len(reader.wrong) == 6


def test_missing_keys_have_the_defaults_of_the_family():
  sizes = {
    "vocab_size": 1, "hidden_size": 16, "intermediate_size": 1,
    "num_hidden_layers": 1, "num_attention_heads": 2, "rope_theta": LARGEST,
  }
  for family, width in (("llama", 0), ("mistral", 0), ("qwen2", 0),
                        ("qwen3", 128)):
    section, wrong = families.parse_published_config(
      sizes | {"model_type": family}
    )
    assert not wrong
    assert section["head_width"] == width
    assert section["num_kv_heads"] == 2
    assert section["norm_eps"] == 1e-6
    assert section["rope_base"] == LARGEST
    assert not section["tied_embeddings"]
    one = families.parse_published_config(
      sizes | {"model_type": family, "num_key_value_heads": 1}
    )[0]
    assert one["num_kv_heads"] == 1


def test_no_family_has_both_biases_and_norms():
  config = make_config(
    families.parse_published_config(json.loads(
      (FIXTURES / "qwen3/config.json").read_text()
    ))[0] | {"qkv_bias": True}
  )
  with pytest.raises(ValueError, match=r"none of .* has both"):
    families.to_published_config(config, "float32", 64)


@pytest.mark.parametrize(
  ("fields", "window"),
  [
    ({"model_type": "mistral"}, 4096),
    ({"model_type": "mistral", "sliding_window": None}, 0),
    ({"model_type": "llama", "sliding_window": 7}, 0),
    ({"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 0}, 0),
    ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True,
      "max_window_layers": 0}, 7),
    ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True,
      "max_window_layers": 2}, 0),
    # As in sliced models: less than zero layers, more than all.
    ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True,
      "max_window_layers": -1}, 7),
    ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True,
      "max_window_layers": 9}, 0),
    ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True,
      "layer_types": ["sliding_attention"] * 2}, 7),
    ({"model_type": "qwen2", "use_sliding_window": True,
      "max_window_layers": 0}, 4096),
    # Without max_window_layers the first 28 layers have full attention.
    ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True,
      "num_hidden_layers": 28}, 0),
  ],
)
def test_sliding_window_of_layers_is_read_from_the_config(fields, window):
  sizes = json.loads((FIXTURES / "mistral/config.json").read_text())
  del sizes["sliding_window"]
  section, wrong = families.parse_published_config(sizes | fields)
  assert (section["sliding_window"], wrong) == (window, [])
  if fields.get("num_hidden_layers") == 28:
    _, wrong = families.parse_published_config(
      sizes | fields | {"num_hidden_layers": 29}
    )
    assert "layers differ in layer_types or max_window_layers=28" in wrong[0]
