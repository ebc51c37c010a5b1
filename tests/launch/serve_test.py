"""Server as users run it: responses, graceful shutdown, and SIGKILL."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import socket
import time

import httpx2
import pytest

from caatnet.config import experts
from caatnet.config.override import override
from caatnet.serving.server import client, load, local
from configs.serving import experts as experts_config

SETTINGS = (
  "--cpu_devices=1", "--config.inference.context=512",
  "--config.inference.batch=2", "--nowarm_up", "--programs=",
)


def started(launch, *args):
  """Starts a server; returns its process, its files and its address."""
  process, out, err = launch.start("serve", "--port=0", *args, *SETTINGS)
  while process.is_alive():
    text = out.read_text() if out.exists() else ""
    found = re.search(r"http://[\d.]+:\d+", text)
    if found and "slots" in text:
      return process, out, err, found[0]
    time.sleep(0.02)
  raise AssertionError(err.read_text())


def test_server_is_replayed_and_finishes_requests_after_a_signal(
  launch, workdir
):
  process, out, err, url = started(launch, f"--workdir={workdir}", "--name=it")
  ended = launch(
    "replay", f"--url={url}", "--sessions=3", "--rate=50", "--json",
    "--num_requests=3", "--arrivals_seed=1",
  )
  assert ended.returncode == 0, ended.stderr
  result = json.loads(ended.stdout)
  assert result["errors"] == []
  assert result["requests"] + result["left_out"] == 3
  assert result["measures"]["TTFT"]["n"] == result["requests"] > 0
  long = {"model": "it", "prompt": "a", "max_tokens": 400, "ignore_eos": True,
          "temperature": 0, "stream": True, "logprobs": 0}
  with httpx2.stream(
    "POST", f"{url}/v1/completions", json=long, timeout=300
  ) as answer:
    lines = answer.iter_lines()
    next(lines)
    os.kill(process.pid, signal.SIGTERM)
    while "SIGTERM" not in out.read_text():
      time.sleep(0.01)
    refused = httpx2.post(f"{url}/v1/completions", json=long, timeout=60)
    health = httpx2.get(f"{url}/health", timeout=60)
    events = [line for line in lines if line.startswith("data: ")]
  assert refused.status_code == 503
  assert refused.headers["Retry-After"]
  assert health.status_code == 503
  assert health.json() == {"status": "draining"}
  assert events[-1] == "data: [DONE]"
  assert len(events) == 400  # the first event was read before
  process.join(30)
  assert process.exitcode == 0, err.read_text()


def test_policy_is_served_by_a_child_until_the_end_of_the_context(workdir):
  with local.running_server(str(workdir), [
    "--config.serving.policy=vtc", "--name=child", *SETTINGS
  ]) as url:
    assert asyncio.run(client.read_model_card(url, ""))["id"] == "child"
    result = load.replay(
      url, load.Load(sessions=2, rate=50.0, think_s=0.0, max_tokens=3), "",
      lambda number, left_out: None, lambda: None,
    )
  assert result["errors"] == []
  assert result["tokens"] <= 3 * result["requests"]
  with pytest.raises(ValueError, match="--url=http"):
    asyncio.run(client.read_model_card(url, ""))
  with (
    pytest.raises(ValueError, match=r"the server: .*policy='no' must be one"),
    local.running_server(str(workdir), ["--config.serving.policy=no"]),
  ):
    pass


def test_occupied_port_is_a_one_line_error(launch, workdir):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    ended = launch("serve", f"--workdir={workdir}", f"--port={port}")
  assert ended.returncode == 2
  assert ended.stderr.splitlines()[-1] == (
    f"error: --port={port} of --host=127.0.0.1: Address already in use; "
    "--port=0 selects a free port"
  )


def test_restarted_server_of_experts_gives_the_same_answers(launch, tmp_path):
  """SIGKILL arrives while requests switch four experts on two slots."""
  config = override(
    experts_config.get_config("random"), "parallel.tensor=1 model.width=16 "
    "model.num_heads=2 model.num_kv_heads=2 model.num_layers=1 "
    "model.ffn_width=16 model.init_std=0.5",
  )
  library = experts.create_random(tmp_path / "experts", config, 4)
  listed = library.entries
  arguments = (
    "--config=configs/serving/experts.py", "--config.experts.slots=2",
    f"--config.experts.path={library.path}", "--config.experts.host_experts=1",
  )

  def ask(name, count):
    return httpx2.post(f"{url}/v1/completions", timeout=120, json={
      "model": name, "prompt": "0123456789", "max_tokens": count, "seed": 3,
      "ignore_eos": True, "temperature": 1,
    }).json()["choices"][0]["text"]

  process, _, _, url = started(launch, *arguments)
  expected = [ask(name, 9) for name in library.names]
  assert len(set(expected)) == 4
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    asked = [pool.submit(ask, library.names[i % 4], 400) for i in range(8)]
    next(concurrent.futures.as_completed(asked))
    process.kill()
  assert any(isinstance(x.exception(), httpx2.HTTPError) for x in asked)
  process.join(30)
  assert process.exitcode == -signal.SIGKILL
  assert not library.refresh()
  assert library.entries == listed
  process, _, _, url = started(launch, *arguments)
  assert [ask(name, 9) for name in library.names] == expected
  process.kill()
  process.join(30)
