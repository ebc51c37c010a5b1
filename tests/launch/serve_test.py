"""A server as users run it: it answers, and ends in good order."""

import json
import os
import re
import signal
import socket
import time

import httpx2

SETTINGS = (
  "--cpu_devices=1", "--config.inference.context=512",
  "--config.inference.batch=2", "--nowarm_up", "--programs=",
)


def started(launch, workdir, *args):
  """Starts a server; returns its process, its files and its address."""
  process, out, err = launch.start(
    "serve", f"--workdir={workdir}", "--port=0", "--name=it", *SETTINGS, *args
  )
  while process.is_alive():
    text = out.read_text() if out.exists() else ""
    found = re.search(r"http://[\d.]+:\d+", text)
    if found and "slots" in text:
      return process, out, err, found[0]
    time.sleep(0.02)
  raise AssertionError(err.read_text())


def test_it_is_replayed_and_a_signal_lets_what_runs_finish(launch, workdir):
  process, out, err, url = started(launch, workdir)
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
  assert len(events) == 400  # the first one was read before
  process.join(30)
  assert process.exitcode == 0, err.read_text()


def test_a_port_that_is_taken_is_one_line(launch, workdir):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    ended = launch("serve", f"--workdir={workdir}", f"--port={port}")
  assert ended.returncode == 2
  assert ended.stderr.splitlines()[-1] == (
    f"error: --port={port} of --host=127.0.0.1: Address already in use; "
    "--port=0 selects a free port"
  )
