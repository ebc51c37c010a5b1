"""One federated run of the comparison with Flower, in a network namespace.

  unshare -rn python -m caatnet.benchmarks.foreign.flower_session ours

The namespace has only a loopback device, whose number of bytes is printed at
the end. With rates, a token bucket (htb) for each direction limits the sum of
all clients, as in one radio cell; nothing is delayed. The options are in the
environment, as for `flower_client.py`.
"""

import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time
from typing import Any

from caatnet.benchmarks.foreign import flower_client
from caatnet.federated import processes

_LISTEN_S = 120.0
_HERE = pathlib.Path(__file__).parent
_CLIENT = "flower_client"


def main(system: str) -> None:
  """Runs a server and its clients until the end of the run.

  Args:
    system: "ours" or "flower".
  """
  options = json.loads(os.environ[flower_client.OPTIONS])
  os.environ["ELASTIC_TOKEN"] = secrets.token_hex()
  folder = pathlib.Path(options["folder"])
  _shape(options)
  if system == "ours":
    server = _ours(options)
    client = [sys.executable, "-m", f"{__package__}.{_CLIENT}", system]
  else:
    server = [options["python"], str(_HERE / "flower_server.py")]
    client = [options["python"], str(_HERE / f"{_CLIENT}.py"), system]
  with open(folder / "server.log", "w") as log:
    process = subprocess.Popen(server, stdout=log, stderr=subprocess.STDOUT)
  try:
    _wait_for_server(process)
    with processes.Clients(client, options["clients"], folder) as clients:
      while process.poll() is None:
        clients.check()
        time.sleep(0.05)
      if process.returncode:
        raise ValueError(f"the server has ended: {process.returncode}")
    print(json.dumps({"bytes": _loopback_bytes()}))
  finally:
    process.kill()
    process.wait()


def _ours(options: dict[str, Any]) -> list[str]:
  """Returns the command of this project's server."""
  values = {
    "clients": options["clients"], "per_round": options["clients"],
    "rounds": options["rounds"], "validate": options["evaluate"],
    "outlier_factor": 0.0,  # Flower has no such check
    "numpy_client": f"{_HERE / _CLIENT}.py:client_fn",
  }
  host, _, port = flower_client.ADDRESS.partition(":")
  return [
    sys.executable, "-m", "launch.federate", "--role=server",
    "--config=configs/federated/numpy.py", f"--host={host}", f"--port={port}",
    f"--workdir={options['folder']}/run",
    *(f"--config.federated.{key}={x}" for key, x in values.items()),
  ]


def _shape(options: dict[str, Any]) -> None:
  """Sets up the loopback device."""
  _call("ip link set lo up")
  if not options["down"]:
    return
  port = flower_client.ADDRESS.partition(":")[2]
  _call("tc qdisc add dev lo root handle 1: htb")
  for number, end, mbit in ((1, "sport", "down"), (2, "dport", "up")):
    # Packets of loopback have up to 64 KB, which a bucket must hold.
    _call(f"tc class add dev lo parent 1: classid 1:{number} htb rate "
          f"{options[mbit]}mbit burst 128kb cburst 128kb quantum 65536")
    _call(f"tc filter add dev lo parent 1: protocol ip u32 match ip {end} "
          f"{port} 0xffff flowid 1:{number}")


def _loopback_bytes() -> int:
  """Returns the bytes that this namespace has transmitted."""
  with open("/proc/net/dev") as devices:
    (line,) = (x for x in devices if x.strip().startswith("lo:"))
  return int(line.split()[1])


def _call(command: str) -> None:
  subprocess.run(command.split(), check=True)


def _wait_for_server(process: subprocess.Popen) -> None:
  """Waits until the server listens.

  Raises:
    ValueError: It has ended, or does not listen in time.
  """
  host, _, port = flower_client.ADDRESS.partition(":")
  limit = time.monotonic() + _LISTEN_S
  while process.poll() is None and time.monotonic() < limit:
    try:
      socket.create_connection((host, int(port)), 1.0).close()
      return
    except OSError:
      time.sleep(0.05)
  raise ValueError(f"the server does not listen: code {process.poll()}")


if __name__ == "__main__":
  main(*sys.argv[1:])
