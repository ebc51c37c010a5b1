"""Benchmark of peers: a complete run, and processes in the place of peers."""

import concurrent.futures
import json
import sys

import pytest

from caatnet.benchmarks.harness import environments
from caatnet.benchmarks.peers import peers
from configs.benchmark import peers as config_file

# Python that answers as a peer would, without torch.
PEER = """#!{python}
import json, sys
script = sys.argv[2]
assert sys.argv[1] == "-P"
asked = json.loads(input())
assert asked["model"]["hidden_size"] == 32
print(json.dumps({{"name": "peer", "num_params": 1, "transformers": "5",
                  "torch": "2"}}), flush=True)
for line in sys.stdin:
  asked = json.loads(line)
  answer = (
    {{"seconds": 0.5 / asked["steps"]}} if script.endswith("torch_step.py")
    else {{"prompt_seconds": 1.0, "decode_seconds": 2.0}}
  )
  print(json.dumps(answer), flush=True)
"""

# Python that makes an environment of itself, slowly, and notes its commands.
MAKER = """#!/bin/sh
case $2 in
  venv) to=$3; sleep 0.2; mkdir -p $to/bin; cp $0 $to/bin/python
    echo "$@" >> $(dirname $0)/commands;;
  pip) echo "$@" >> $(dirname $0)/../../commands;;
esac
"""


def test_rows_of_peers_are_what_they_answer(tmp_path):
  python = tmp_path / "python"
  python.write_text(PEER.format(python=sys.executable))
  python.chmod(0o755)
  config = config_file.get_config("test")
  config.benchmark.python = str(python)
  found = peers.run(config)
  ours, peer = found["training"]
  assert ours["by"] == "r=1"
  assert peer["seconds"] == [0.5]
  assert peer["tokens_per_second"] == [8 * 16 / 0.5]
  ours, peer = found["decoding"]
  tokens = config.benchmark.tokens - 1
  assert peer["tokens_per_second"] == [tokens / 2]
  ratio = ours["weight_bytes_per_second"][0] / ours["tokens_per_second"][0]
  model = config.model
  layer = model.width * (4 * model.width + 3 * model.ffn_width + 2)
  assert ratio == 4 * (
    model.num_layers * layer + model.width * (1 + model.vocab_size)
  )
  assert min(found["limits"].values()) > 1e6
  json.dumps(found)


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
  assert [line.split()[1] for line in lines] == ["venv", "pip"]
