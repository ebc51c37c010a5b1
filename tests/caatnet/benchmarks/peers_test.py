"""Benchmark of peers: a complete run, and processes in the place of peers."""

import concurrent.futures
import io
import itertools
import json
import os
import sys
import types

from flax import linen
import jax
import optax
import pytest

from caatnet.benchmarks.harness import environments
from caatnet.benchmarks.peers import nanodo_step, over_http, peers, servers
from configs.benchmark import peers as config_file
from tests.caatnet.benchmarks.printed import rows_of

# Python that answers as a peer would, without torch.
PEER = """#!{python}
import json, sys
script = sys.argv[2]
assert sys.argv[1] == "-P"
asked = json.loads(input())
assert asked["model"]["hidden_size"] == 32
if "path" in asked:
  open(asked["path"], "w").write(asked["type"])
if script.endswith("llama.py"):
  import numpy
  numbers = numpy.load(asked["weights"])
  assert numbers["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
slow = 1 - asked.get("compiled", 0) / 2
kind = asked.get("type", "") + ", compiled" * (slow < 1)
print(json.dumps({{"name": "peer " + kind, "num_params": 1,
                  "transformers": "5", "torch": "2", "bytes": 400,
                  "elements": 256 * 32 * 2}}), flush=True)
for line in sys.stdin:
  asked = json.loads(line)
  answer = (
    {{"seconds": slow / 2 / asked["steps"]}} if script.endswith("torch_step.py")
    else {{"prompt_seconds": 1.0, "decode_seconds": 2.0 * slow,
           "tokens": [[0]] * asked["batch"]}}
  )
  print(json.dumps(answer), flush=True)
"""

# Programs that serve as vLLM's or as llama.cpp's: one token per event, each of
# 1 ms.
SERVER = """#!{python}
import http.server, json, os, pathlib, sys, time
vllm = ["-m", "vllm.entrypoints.openai.api_server"] == sys.argv[1:3]
options = {{}}
for x in sys.argv[3 if vllm else 1:]:
  assert vllm or "=" not in x  # which llama.cpp does not know
  if x.startswith("--"):
    key, _, value = x[2:].partition("=")
    options[key] = value
  else:
    options[key] = x
if vllm:
  folder = pathlib.Path(options["model"])
  sizes = json.loads((folder / "config.json").read_text())
  words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
  assert sorted(words.values()) == list(range(sizes["vocab_size"]))
  assert sizes["max_position_embeddings"] == int(options["max-model-len"]) == 50
  assert (options["max-num-seqs"], options["dtype"]) == ("1", "float32")
  assert os.environ["OMP_NUM_THREADS"] == "3"
  assert "no-enable-prefix-caching" in options
else:
  assert pathlib.Path(options["model"]).read_text() == "F32"
  assert (options["ctx-size"], options["parallel"]) == ("51", "1")
  assert "no-cache-prompt" in options
  assert options["threads"] == options["threads-batch"] == "3"

class Server(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200)
    self.end_headers()
  def do_POST(self):
    size = int(self.headers["Content-Length"])
    asked = json.loads(self.rfile.read(size))
    assert (asked["model"], len(asked["prompt"])) == ("benchmark", 15)
    self.do_GET()
    for _ in range(asked["max_tokens"]):
      time.sleep(1e-3)
      self.wfile.write(b'data: {{"choices":[{{"text":"0 "}}]}}\\n\\n')
    used = {{"usage": {{"completion_tokens": asked["max_tokens"]}}}}
    for last in (json.dumps(used), "[DONE]"):
      self.wfile.write(f"data: {{last}}\\n\\n".encode())

http.server.ThreadingHTTPServer(
  (options["host"], int(options["port"])), Server
).serve_forever()
"""

# Python that makes an environment of itself, slowly, and notes its commands.
MAKER = """#!/bin/sh
case $2 in
  venv) to=$3; sleep 0.2; mkdir -p $to/bin; cp $0 $to/bin/python
    echo "$@" >> $(dirname $0)/commands;;
  pip|uv) echo "$@" >> $(dirname $0)/../../commands;;
esac
"""


def test_rows_of_peers_are_what_they_answer(tmp_path, capsys):
  python = tmp_path / "python"
  python.write_text(PEER.format(python=sys.executable))
  python.chmod(0o755)
  config = config_file.get_config("test")
  config.benchmark.python_path = str(python)
  config.benchmark.llama = ("Q8_0",)
  found = peers.run(config)
  ours, peer, compiled = found["training"]
  assert ours["by"] == "r=1"
  assert (peer["seconds"], compiled["seconds"]) == ([0.5], [0.25])
  assert peer["tokens_per_second"] == [8 * 16 / 0.5]
  ours, coded, peer, compiled, llama = found["decoding"]
  assert compiled["by"] == peer["by"] + ", compiled"
  assert coded["by"] == "caatnet, int8"
  assert llama["by"] == "peer Q8_0"
  # Half of the elements are the embedding's, of which a step reads rows.
  speed = llama["tokens_per_second"][0]
  assert llama["weight_bytes_per_second"] == [200 * speed]
  tokens = config.benchmark.tokens - 1
  assert peer["tokens_per_second"] == [tokens / 2]
  assert compiled["tokens_per_second"] == [tokens]
  assert peer["prompt_tokens_per_second"] == [config.benchmark.prompt]
  ratio = ours["weight_bytes_per_second"][0] / ours["tokens_per_second"][0]
  model = config.model
  layer = model.width * (4 * model.width + 3 * model.ffn_width + 2)
  assert ratio == 4 * (
    model.num_layers * layer + model.width * (1 + model.vocab_size)
  )
  assert min(found["limits"].values()) > 1e6
  rate = found["limits"]["read_bytes_per_second"]
  printed = capsys.readouterr().out
  assert f"reads of memory {rate / 1e9:.1f} GB/s" in printed
  json.dumps(found)
  config.benchmark.llama, config.benchmark.variants = ("F32",), ()
  config.benchmark.batches = (2,)
  with pytest.raises(ValueError, match="peer F32 draws other tokens"):
    peers.run(config)


def test_peers_have_the_sizes_of_our_model():
  config = config_file.get_config("test")
  config.benchmark.nanodo, config.benchmark.threads = "nanodo", 3
  config.model.num_layers = 5
  torch, compiled, nanodo = peers._peer_scripts(config, "python")
  for found, is_compiled in ((torch, False), (compiled, True)):
    assert (found[0][:2], found[2]) == (["python", "-P"], {})
    assert (found[3]["threads"], found[3]["compiled"]) == (3, is_compiled)
  assert nanodo[2]["PYTHONPATH"] == os.path.abspath("nanodo")
  for *_, sizes in (torch, compiled, nanodo):
    assert (sizes["batch"], sizes["length"]) == (8, 16)
  # Two matrices of an MLP have the parameters of our three.
  assert 2 * nanodo[3]["model"].pop("F") == 3 * config.model.ffn_width
  heads = config.model.num_heads
  assert nanodo[3]["model"] == {"D": 32, "H": heads, "L": 16, "N": 5, "V": 256}


def test_interrupted_benchmark_continues(tmp_path):
  config = config_file.get_config("test")
  config.benchmark.results = str(tmp_path / "peers.json")
  config.benchmark.variants = ()
  found = peers.run(config)
  first = found["decoding"]
  assert [row["batch"] for row in first] == [1, 1]
  # Rows of the file are not measured again.
  again = peers.run(config)
  assert again["decoding"] == first
  assert again["limits"] == found["limits"]  # those of the measured rows


class Bigram(linen.Module):
  """Large logits of the next token, a row of a matrix for each token."""

  calls = itertools.count()

  @linen.compact
  def __call__(self, tokens):
    next(self.calls)
    return 50 * linen.Embed(7, 7)(tokens)


def test_steps_of_a_module_of_flax_are_timed_steps_of_adamw(
  monkeypatch, capsys
):
  monkeypatch.setattr(sys, "stdin", io.StringIO('{"steps": 1}\n{"steps": 2}'))
  before = next(Bigram.calls)
  nanodo_step.answer_timing_requests(Bigram(), 3, 5, 7)
  # Traced for its parameters and for a step, which is compiled once.
  assert next(Bigram.calls) == before + 1 + 2
  size, *answers = map(json.loads, capsys.readouterr().out.splitlines())
  assert size["num_params"] == 49
  assert min(answer["seconds"] for answer in answers) > 0

  tokens = jax.random.randint(jax.random.key(0), (3, 6), 0, 7)

  def loss(params):
    logits = jax.nn.log_softmax(Bigram().apply(params, tokens[:, :-1]))
    return -jax.numpy.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

  params = Bigram().init(jax.random.key(1), tokens)
  optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
  state, losses = optimizer.init(params), []
  for _ in range(3):
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    losses.append(float(value))
    norm = optax.tree.norm(grads)
    assert norm > 1
    grads = optax.tree.scale(1 / norm, grads)
    updates, state = jax.jit(optimizer.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
  # Each answer has the loss of its last step, before its update.
  assert [answer["loss"] for answer in answers] == pytest.approx(
    [losses[0], losses[2]], rel=1e-5
  )
  assert losses[2] < 0.999 * losses[0]


def test_streams_of_all_servers_are_counted(tmp_path):
  for name, program in (("server", SERVER), ("python", PEER)):
    python = tmp_path / name
    python.write_text(program.format(python=sys.executable))
    python.chmod(0o755)
  config = config_file.get_config("test")
  config.benchmark.vllm = str(tmp_path / "server")
  config.benchmark.llama_server = str(tmp_path / "server")
  config.benchmark.threads = 3
  ours, *others = over_http.measure_servers(config, str(tmp_path / "python"))
  assert [row["by"] for row in (ours, *others)] == [
    "caatnet", "vllm", "llama.cpp"
  ]
  assert min(ours["tokens_per_second"]) > 0
  for row in (ours, *others):
    assert (row["streams"], row["batch"]) == (2, 1)
  for row in others:
    # Two streams at once, whose tokens take at least 1 ms.
    assert 0 < row["tokens_per_second"][0] < 2 * 1000
    assert row["ttft_p50_s"][0] > 1e-3


@pytest.mark.parametrize(("program", "message"), [
  (None, "No such file"),
  ("import sys; sys.exit('RuntimeError: of vLLM')", "RuntimeError: of vLLM$"),
])
def test_server_that_does_not_start_is_one_line(program, message, tmp_path):
  config = config_file.get_config("test")
  config.benchmark.vllm = str(tmp_path / "python")
  if program:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
  with (
    pytest.raises(ValueError, match=f"benchmark.vllm.*{message}") as error,
    servers.vllm(config, 1, 50),
  ):
    pass
  assert "\n" not in str(error.value)


def test_environment_that_cannot_be_made_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="No such file"):
    environments.create(tmp_path / "made", ["x"], str(tmp_path / "python"))


def test_environment_is_made_once_by_two_processes(tmp_path):
  """Threads with own locks of the file; each command is counted."""
  python = tmp_path / "python"
  python.write_text(MAKER)
  python.chmod(0o755)
  folder = tmp_path / "made"
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    found = list(threads.map(
      lambda _: environments.create(folder, ["x"], str(python)), range(2)
    ))
  assert found == [folder / "bin/python"] * 2
  lines = (tmp_path / "commands").read_text().splitlines()
  assert [line.split()[1] for line in lines] == ["venv", "pip", "uv"]


def test_sequences_of_float32_weights_must_mostly_be_equal():
  ours = [[1, 2], [3, 4], [5, 6]]
  half = [[1, 2], [3, 4], [5, 7]]
  few = [[1, 2], [3, 5], [5, 7]]
  found = peers._equal_fractions({
    "caatnet": ours, "x Q8_0": few, "x F32": half,
  })
  assert found == pytest.approx({
    "caatnet": 1, "x Q8_0": 1 / 3, "x F32": 2 / 3
  })
  with pytest.raises(ValueError, match=r"x F32 draws .* 67% of 3 sequences"):
    peers._equal_fractions({"caatnet": ours, "x F32": few})
  # Exactly half is enough, and a single sequence says little.
  for num, equal in ((2, 0.5), (1, 0.0)):
    found = peers._equal_fractions({"caatnet": ours[:num], "x F32": [
      [1, 2], [0, 0]
    ][-num:]})
    assert found["x F32"] == equal


def test_tables_have_rates_ratios_and_shares(capsys):
  config = types.SimpleNamespace(
    data=types.SimpleNamespace(batch_size=8, seq_len=16)
  )
  first = {
    "by": "r=1", "num_params": 25.5e6, "seconds": [2.0, 4.0], "flops": 6e9,
    "tokens_per_second": [100.0, 400.0],
  }
  other = {
    "by": "torch", "num_params": 1e6, "seconds": [1.0],
    "tokens_per_second": [50.0, 100.0],
  }
  peers._print_training(config, [first, other], 4e9)
  printed = capsys.readouterr().out
  assert "training step, 8 x 16 tokens, float32; products 4 GFLOP/s" in printed
  assert rows_of(printed) == [
    ["r=1", "25.5M", "250 (100 to 400)", "1.00 (1.00 to 1.00)", "50%"],
    ["torch", "1.0M", "75 (50 to 100)", "3.00 (2.00 to 4.00)", ""],
  ]
  peers._print_decoding([
    {"batch": batch, "by": by, "tokens_per_second": [rate, 2 * rate],
     "weight_bytes_per_second": [1e9 * rate, 3e9 * rate],
     "prompt_tokens_per_second": [10 * rate, 30 * rate]}
    for batch, by, rate in (
      (1, "caatnet", 100.0), (1, "torch", 50.0), (16, "caatnet", 20.0)
    )
  ], 12.5e9)
  printed = capsys.readouterr().out
  assert "reads of memory 12.5 GB/s" in printed
  assert rows_of(printed) == [
    ["1", "caatnet", "150 (100 to 200)", "1.00 (1.00 to 1.00)",
     "200.0 (100.0 to 300.0)", "2,000 (1,000 to 3,000)"],
    ["1", "torch", "75 (50 to 100)", "2.00 (2.00 to 2.00)",
     "100.0 (50.0 to 150.0)", "1,000 (500 to 1,500)"],
    ["16", "caatnet", "30 (20 to 40)", "1.00 (1.00 to 1.00)",
     "40.0 (20.0 to 60.0)", "400 (200 to 600)"],
  ]
  over_http.show([
    {"by": "caatnet", "streams": 32, "batch": 16, "ttft_p50_s": [0.5],
     "tokens_per_second": [100.0, 300.0]},
    {"by": "vllm", "streams": 32, "batch": 16, "ttft_p50_s": [0.25, 0.75],
     "tokens_per_second": [50.0, 100.0]},
  ])
  printed = capsys.readouterr().out
  assert "32 streams over HTTP, at most 16 at a time" in printed
  assert rows_of(printed) == [
    ["caatnet", "200 (100 to 300)", "1.00 (1.00 to 1.00)",
     "0.50 (0.50 to 0.50)"],
    ["vllm", "75 (50 to 100)", "2.50 (2.00 to 3.00)", "0.50 (0.25 to 0.75)"],
  ]
