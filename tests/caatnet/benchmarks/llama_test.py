"""Script of llama.cpp with stand-ins: its file, its context and its tokens."""

import collections
import ctypes
import os
import time
import types

import numpy as np
import pytest

from caatnet.benchmarks.peers import llama

VOCABULARY, BATCH, POSITIONS, STEP_S = 7, 2, 9, 0.005
MODEL = {
  "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 6,
  "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
  "max_position_embeddings": POSITIONS,
}
ASKED = {
  "model": MODEL, "batch": BATCH, "threads": 3, "type": "Q8_0",
  "norm_eps": 1e-5, "rope_base": 1e4,
}
# Names of Hugging Face and of llama.cpp, and shapes.
TENSORS = {
  "model.embed_tokens": ("token_embd", (VOCABULARY, 8)),
  "model.norm": ("output_norm", (8,)),
  "lm_head": ("output", (VOCABULARY, 8)),
} | {
  f"model.layers.{layer}.{theirs}": (f"blk.{layer}.{ours}", shape)
  for layer in range(2) for theirs, ours, shape in (
    ("input_layernorm", "attn_norm", (8,)),
    ("self_attn.q_proj", "attn_q", (8, 8)),
    ("self_attn.k_proj", "attn_k", (4, 8)),
    ("self_attn.v_proj", "attn_v", (4, 8)),
    ("self_attn.o_proj", "attn_output", (8, 8)),
    ("post_attention_layernorm", "ffn_norm", (8,)),
    ("mlp.gate_proj", "ffn_gate", (6, 8)),
    ("mlp.up_proj", "ffn_up", (6, 8)),
    ("mlp.down_proj", "ffn_down", (8, 6)),
  )
}


@pytest.fixture
def weights(tmp_path):
  """Returns different values of all tensors, and their file."""
  draw = np.random.default_rng(0)
  found = {
    f"{name}.weight": draw.normal(size=shape).astype(np.float32)
    for name, (_, shape) in TENSORS.items()
  }
  np.savez(tmp_path / "weights.npz", **found)
  return found, str(tmp_path / "weights.npz")


@pytest.fixture
def files(install):
  """Returns the writers of GGUF files that a script has made."""
  made = []

  class Writer:
    def __init__(self, path, architecture):
      self.path, self.architecture = path, architecture
      self.keys, self.tensors, self.written = {}, {}, []
      made.append(self)

    def add_tensor(self, name, x, raw_dtype=None):
      assert name not in self.tensors
      self.tensors[name] = x, raw_dtype

    def __getattr__(self, name):
      verb, _, key = name.partition("_")
      if verb == "add":
        return lambda value: self.keys.update({key: value})
      return lambda: self.written.append(name)

    def close(self):
      with open(self.path, "wb") as file:
        file.write(bytes(1234))

  install(gguf={
    "GGUFWriter": Writer, "TokenType": types.SimpleNamespace(NORMAL=1),
    "GGMLQuantizationType": {"F32": 0, "Q8_0": 8},
    "quants": types.SimpleNamespace(quantize=lambda x, kind: x + kind),
  })
  return made


class Api:
  """The part of llama.cpp that the script uses.

  The next token is the sum of the sequence's tokens, modulo their number.
  """

  __version__ = "9.8"
  made = True  # whether a context can be made
  code = 0  # result of a step

  def __init__(self):
    self.sequences = collections.defaultdict(list)
    self.llama_log_callback = lambda function: function
    self.llama_log_set = lambda function, data: None
    self.llama_model_default_params = lambda: "default"
    self.llama_context_default_params = types.SimpleNamespace
    self.llama_model_n_params = lambda model: 55
    self.llama_get_memory = lambda context: context.sequences
    self.llama_print_system_info = lambda: b"AVX = 1"

  def llama_model_load_from_file(self, path, params):
    assert params == "default"
    return "model" if os.path.exists(path) else None

  def llama_init_from_model(self, model, options):
    assert model == "model"
    self.options = options
    return self if self.made else None

  def llama_batch_init(self, count, embedding, sequences):
    assert (embedding, sequences) == (0, 1)
    return types.SimpleNamespace(
      token=[-1] * count, pos=[-1] * count, n_seq_id=[0] * count,
      seq_id=[[-1] for _ in range(count)], logits=[False] * count,
    )

  def llama_memory_clear(self, memory, data):
    assert data is True
    memory.clear()

  def llama_decode(self, context, batch):
    time.sleep(STEP_S)
    self.logits = {}
    for i in range(batch.n_tokens):
      assert batch.n_seq_id[i] == 1
      tokens = self.sequences[batch.seq_id[i][0]]
      assert batch.pos[i] == len(tokens)
      tokens.append(batch.token[i])
      if batch.logits[i]:
        found = (ctypes.c_float * VOCABULARY)()
        found[sum(tokens) % VOCABULARY] = 1.0
        self.logits[i] = found
    return self.code

  def llama_get_logits_ith(self, context, i):
    return ctypes.cast(self.logits[i], ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def api(install):
  made = Api()
  install(llama_cpp={
    name: getattr(made, name) for name in dir(made)
    if name.startswith("llama") or name == "__version__"
  })
  return made


def test_rounds_continue_prompts_with_the_most_probable_tokens(
  files, api, weights, answers
):
  prompts = [[1, 2, 3], [6, 0, 5]]
  asked = {"prompts": prompts, "tokens": 4}
  expected = []
  for tokens in map(list, prompts):
    for _ in range(4):
      tokens.append(sum(tokens) % VOCABULARY)
    expected.append(tokens[3:])
  about, *rounds = answers(
    llama.main, ASKED | {"weights": weights[1]}, asked, asked
  )
  assert about == {
    "name": "llama.cpp of llama-cpp-python 9.8, Q8_0",
    "instructions": "AVX = 1", "bytes": 1234, "elements": 55,
  }
  assert len(rounds) == 2
  for found in rounds:
    assert found["tokens"] == expected
    assert found["prompt_seconds"] >= STEP_S
    assert found["decode_seconds"] >= 3 * STEP_S  # of three tokens
  # All prompts at once, and all tokens of all sequences.
  options = vars(api.options)
  assert options == {
    "n_ctx": BATCH * POSITIONS, "n_batch": BATCH * POSITIONS,
    "n_ubatch": BATCH * POSITIONS, "n_seq_max": BATCH, "n_threads": 3,
    "n_threads_batch": 3, "type_k": 0, "type_v": 0,
  }


def test_file_has_the_model_and_its_tensors_under_other_names(
  files, weights, tmp_path
):
  values, path = weights
  llama.write(str(tmp_path / "model.gguf"), ASKED | {"weights": path})
  (file,) = files
  assert file.architecture == "llama"
  assert file.keys == {
    "vocab_size": VOCABULARY, "tokenizer_model": "no_vocab",
    "context_length": POSITIONS, "embedding_length": 8,
    "feed_forward_length": 6, "block_count": 2, "head_count": 2,
    "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4,
    "rope_dimension_count": 4,
  }
  assert file.written == [
    "write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"
  ]
  assert file.tensors.keys() == {
    f"{name}.weight" for name, _ in TENSORS.values()
  }
  heads = {"q_proj": [0, 2, 1, 3, 4, 6, 5, 7], "k_proj": [0, 2, 1, 3]}
  for theirs, (ours, shape) in TENSORS.items():
    found, kind = file.tensors[f"{ours}.weight"]
    x = values[f"{theirs}.weight"]
    # Channels that are rotated together are neighbours.
    x = x[heads.get(theirs.rpartition(".")[2], slice(None))]
    # Matrices are quantised, gains remain float32.
    np.testing.assert_array_equal(found, x + 8 * (len(shape) == 2))
    assert kind == (8 if len(shape) == 2 else None)


def test_file_for_a_server_has_a_word_for_each_token(
  files, weights, tmp_path, answers
):
  path = str(tmp_path / "model.gguf")
  (found,) = answers(
    llama.main, ASKED | {"weights": weights[1], "path": path}
  )
  assert found == {"bytes": 1234} == {"bytes": os.path.getsize(path)}
  (file,) = files
  words = file.keys["token_list"]
  assert len(set(words)) == len(words) == VOCABULARY
  assert file.keys["tokenizer_model"] == "llama"
  assert file.keys["token_scores"] == [0.0] * VOCABULARY
  assert file.keys["token_types"] == [1] * VOCABULARY


def test_what_llama_cpp_rejects_is_an_error(api, tmp_path):
  path = tmp_path / "model.gguf"
  with pytest.raises(RuntimeError, match="cannot load the model"):
    llama.Llama(str(path), ASKED)
  path.touch()
  api.made = False
  with pytest.raises(RuntimeError, match="cannot create a context"):
    llama.Llama(str(path), ASKED)
  api.made, api.code = True, 1
  made = llama.Llama(str(path), ASKED)
  with pytest.raises(RuntimeError, match="cannot decode the step"):
    made.step(np.array([[1]]), 0)
