"""Script that times llama.cpp's greedy decoding, for the benchmark of peers.

It runs in a separate Python, which has llama-cpp-python and gguf, and imports
nothing of this repository. It reads one JSON object per line from stdin and
writes one to stdout for each: first the model, whose weights are an npz file
with the names and layouts of Hugging Face's Llama, then for each round the
prompts, and the number of tokens. If the model has a ``path``, the script only
writes a GGUF file there, with a word for each token, for llama.cpp's server.
"""

import ctypes
import json
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

# Hugging Face's name of a layer's matrix or gain -> llama.cpp's name.
LAYER_TENSOR_NAMES = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
GLOBAL_TENSOR_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
}


def gguf_name(name: str) -> str:
  """Returns llama.cpp's name of a tensor."""
  stem = name.removesuffix(".weight")
  if stem in GLOBAL_TENSOR_NAMES:
    return f"{GLOBAL_TENSOR_NAMES[stem]}.weight"
  _, _, layer, part = stem.split(".", 3)
  return f"blk.{layer}.{LAYER_TENSOR_NAMES[part]}.weight"


def interleave_halves(x: np.ndarray, num_heads: int) -> np.ndarray:
  """Orders the rows of queries or keys ``[heads * D, H]`` for llama.cpp.

  Hugging Face rotates channel i of the first half of a head with channel i of
  the second half, llama.cpp's architecture "llama" neighbouring channels.
  """
  halves = x.reshape(num_heads, 2, -1, x.shape[1])
  return halves.swapaxes(1, 2).reshape(x.shape)


def write(path: str, asked: dict[str, Any]) -> None:
  """Writes a GGUF file of the model that a request ``asked`` describes.

  The file has a tokenizer for servers.
  """
  import gguf

  model, weights = asked["model"], np.load(asked["weights"])
  heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
  kind = gguf.GGMLQuantizationType[asked["type"]]
  file = gguf.GGUFWriter(path, "llama")
  file.add_vocab_size(model["vocab_size"])
  if "path" in asked:
    size = model["vocab_size"]
    file.add_tokenizer_model("llama")
    file.add_token_list([f"{i} " for i in range(size)])
    file.add_token_scores([0.0] * size)
    file.add_token_types([gguf.TokenType.NORMAL] * size)
  else:
    file.add_tokenizer_model("no_vocab")
  file.add_context_length(model["max_position_embeddings"])
  file.add_embedding_length(model["hidden_size"])
  file.add_feed_forward_length(model["intermediate_size"])
  file.add_block_count(model["num_hidden_layers"])
  file.add_head_count(heads)
  file.add_head_count_kv(kv_heads)
  file.add_layer_norm_rms_eps(asked["norm_eps"])
  file.add_rope_freq_base(asked["rope_base"])
  file.add_rope_dimension_count(model["hidden_size"] // heads)
  for name in weights.files:
    x = np.ascontiguousarray(weights[name], np.float32)
    if ".q_proj" in name:
      x = interleave_halves(x, heads)
    elif ".k_proj" in name:
      x = interleave_halves(x, kv_heads)
    if x.ndim == 1:  # gains remain float32
      file.add_tensor(gguf_name(name), x)
    else:
      file.add_tensor(
        gguf_name(name), gguf.quants.quantize(x, kind), raw_dtype=kind
      )
  file.write_header_to_file()
  file.write_kv_data_to_file()
  file.write_tensors_to_file()
  file.close()


class Llama:
  """Model and context of llama.cpp."""

  def __init__(self, path: str, asked: dict[str, Any]) -> None:
    """Loads a GGUF file.

    Args:
      path: The file.
      asked: Request: ``threads``, ``batch`` (sequences) and ``model``.

    Raises:
      RuntimeError: llama.cpp rejects the file.
    """
    import llama_cpp as api

    self.api, self.batch = api, asked["batch"]
    self.size = asked["model"]["vocab_size"]
    # Without a callback, the library prints its messages to stderr.
    self._quiet = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(self._quiet, ctypes.c_void_p(0))
    self._model = api.llama_model_load_from_file(
      path.encode(), api.llama_model_default_params()
    )
    if not self._model:
      raise RuntimeError("llama.cpp cannot load the model")
    options = api.llama_context_default_params()
    options.n_ctx = self.batch * asked["model"]["max_position_embeddings"]
    options.n_seq_max = self.batch
    # Positions of a step: at most all prompts at once.
    options.n_batch = options.n_ubatch = options.n_ctx
    options.n_threads = options.n_threads_batch = asked["threads"]
    options.type_k = options.type_v = 0  # float32, as in the other programs
    self._context = api.llama_init_from_model(self._model, options)
    if not self._context:
      raise RuntimeError("llama.cpp cannot create a context")
    self.num_elements = api.llama_model_n_params(self._model)
    self._tokens = api.llama_batch_init(options.n_batch, 0, 1)

  def clear(self) -> None:
    """Empties the KV cache."""
    memory = self.api.llama_get_memory(self._context)
    self.api.llama_memory_clear(memory, True)

  def step(self, tokens: np.ndarray, first: int) -> np.ndarray:
    """Reads tokens, and returns the most probable next one of each sequence.

    Args:
      tokens: int ``[sequences, n]``.
      first: Position of the first column.
    """
    batch, (num, length) = self._tokens, tokens.shape
    batch.n_tokens = num * length
    last = []
    for sequence in range(num):
      for i in range(length):
        at = sequence * length + i
        batch.token[at], batch.pos[at] = int(tokens[sequence, i]), first + i
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.logits[at] = i == length - 1
      last.append(at)
    if self.api.llama_decode(self._context, batch):
      raise RuntimeError("llama.cpp cannot decode the step")
    return np.array([
      np.ctypeslib.as_array(
        self.api.llama_get_logits_ith(self._context, at), (self.size,)
      ).argmax()
      for at in last
    ])


def main() -> None:
  """Loads the model of stdin's first line; times a round for each next line."""
  asked = json.loads(sys.stdin.readline())
  if "path" in asked:
    write(asked["path"], asked)
    answer({"bytes": os.path.getsize(asked["path"])})
    return
  import llama_cpp

  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.gguf")
    write(path, asked)
    llama = Llama(path, asked)
    info = llama_cpp.llama_print_system_info().decode()
    answer({
      "name": f"llama.cpp of llama-cpp-python {llama_cpp.__version__}, "
              f"{asked['type']}",
      "instructions": info, "bytes": os.path.getsize(path),
      "elements": llama.num_elements,
    })
    for line in sys.stdin:
      asked = json.loads(line)
      answer(
        time_generation(llama, np.array(asked["prompts"]), asked["tokens"])
      )


def time_generation(
  llama: Llama, prompts: np.ndarray, count: int
) -> dict[str, Any]:
  """Continues prompts ``[sequences, n]``; returns seconds and new tokens."""
  llama.clear()
  start = time.perf_counter()
  drawn = [llama.step(prompts, 0)]
  first = time.perf_counter()
  for i in range(count - 1):
    drawn.append(llama.step(drawn[-1][:, None], prompts.shape[1] + i))
  end = time.perf_counter()
  return {
    "prompt_seconds": first - start, "decode_seconds": end - first,
    "tokens": np.stack(drawn, axis=1).tolist(),
  }


def answer(value: object) -> None:
  """Writes a line of JSON."""
  print(json.dumps(value), flush=True)


if __name__ == "__main__":
  main()
