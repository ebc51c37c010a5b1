"""One federated run of the comparison with Flower, in network namespaces.

  unshare -rn python -m caatnet.benchmarks.foreign.flower_session ours

Without a link in the options, this process is in a namespace whose only device
is the loopback device. Otherwise there are namespaces of the server and of each
client (`caatnet.benchmarks.harness.namespaces.star`), whose links are measured
before the run. The number of bytes of the server's device and the links are
printed at the end. Options are in the environment, as for `flower_client.py`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import subprocess
import sys
import time
from typing import Any

from caatnet import commands
from caatnet.benchmarks.federated import link_probe
from caatnet.benchmarks.foreign import flower_client
from caatnet.benchmarks.harness import namespaces
from caatnet.benchmarks.harness import processes as harness
from caatnet.federated import links, processes

_LISTEN_S, _RUN_S = 300.0, 900.0
_HERE = pathlib.Path(__file__).parent
_CLIENT, _PORT = "flower_client", 7100


def main(system: str) -> None:
  """Runs a server and its clients until the end of the run.

  Args:
    system: "ours" or "flower".
  """
  options = json.loads(os.environ[flower_client.OPTIONS])
  os.environ["ELASTIC_TOKEN"] = secrets.token_hex()
  folder, num = pathlib.Path(options["folder"]), options["clients"]
  with _network(options["link"], num) as (
    host, at_server, at_clients, measured
  ):
    before = _device_bytes(at_server)  # links have been measured
    options["address"] = f"{host}:{_PORT}"
    os.environ[flower_client.OPTIONS] = json.dumps(options)
    if system == "ours":
      server = _ours(options, host)
      client = [sys.executable, "-m", f"{__package__}.{_CLIENT}", system]
    else:
      server = [options["python"], str(_HERE / "flower_server.py")]
      client = [options["python"], str(_HERE / f"{_CLIENT}.py"), system]
    with open(folder / "server.log", "w") as log:
      process = subprocess.Popen(
        [*harness.with_parent(), *at_server, *server], stdout=log,
        stderr=subprocess.STDOUT,
      )
    try:
      _wait_for_server(process, at_server)
      with processes.Clients([
        [*harness.with_parent(), *prefix, *client, f"--client={k}"]
        for k, prefix in enumerate(at_clients)
      ], folder) as clients:
        limit = time.monotonic() + _RUN_S
        while process.poll() is None:
          clients.check()
          if time.monotonic() > limit:
            raise ValueError(f"the run did not end within {_RUN_S:g} s")
          time.sleep(0.05)
        if process.returncode:
          raise ValueError(f"the server has ended: {process.returncode}")
      num_bytes = _device_bytes(at_server) - before
      print(json.dumps({"bytes": num_bytes, "links": measured}))
    finally:
      process.kill()
      process.wait()


@contextlib.contextmanager
def _network(link: str, num: int) -> Iterator[
  tuple[str, list[str], list[list[str]], list[dict[str, Any]]]
]:
  """Creates the network of a run.

  Args:
    link: Name of a link; "" for loopback.
    num: Number of clients.

  Yields:
    The server's host, prefixes of the server's and each client's command, and
    shaped and measured values of each link.
  """
  if not link:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    yield "127.0.0.1", [], [[]] * num, []
    return
  of_clients = links.of_clients((link,), num)
  with namespaces.star(of_clients) as star:
    found = link_probe.measured(
      of_clients, star.host, star.server, star.prefixes
    )
    yield star.host, ["ip", "netns", "exec", star.server], star.prefixes, [
      {"client": k} | dataclasses.asdict(each) | measured
      for k, (each, measured) in enumerate(zip(of_clients, found, strict=True))
    ]


def _ours(options: dict[str, Any], host: str) -> list[str]:
  """Returns the command of this project's server."""
  values = {
    "clients": options["clients"], "per_round": options["clients"],
    "rounds": options["rounds"], "validate": options["evaluate"],
    "outlier_factor": 0.0,  # Flower has no such check
    "numpy_client": f"{_HERE / _CLIENT}.py:client_fn",
  }
  return commands.spawned(
    "federate", "--role=server", "--config=configs/federated/numpy.py",
    f"--host={host}", f"--port={_PORT}", f"--workdir={options['folder']}/run",
    *(f"--config.federated.{key}={x}" for key, x in values.items()),
  )


def _device_bytes(prefix: list[str]) -> int:
  """Returns the bytes that the server's network device has carried."""
  found = subprocess.run(
    [*prefix, "cat", "/proc/net/dev"], capture_output=True, text=True,
    check=True,
  ).stdout.splitlines()[2:]
  devices = {name.strip(): list(map(int, values.split())) for name, values in (
    line.split(":") for line in found
  )}
  loopback = devices.pop("lo")
  # Loopback receives what it sends.
  return loopback[0] + sum(x[0] + x[8] for x in devices.values())


def _wait_for_server(process: subprocess.Popen, prefix: list[str]) -> None:
  """Waits until the server listens, so that no client has to try again.

  Raises:
    ValueError: It has ended, or does not listen in time.
  """
  limit = time.monotonic() + _LISTEN_S
  while process.poll() is None and time.monotonic() < limit:
    found = subprocess.run(
      [*prefix, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True,
      text=True, check=True,
    ).stdout
    # Local address, remote address with port 0, and state 10: listens.
    if re.search(rf":{_PORT:04X} [0-9A-F]+:0000 0A ", found):
      return
    time.sleep(0.1)
  raise ValueError(f"the server does not listen: code {process.poll()}")


if __name__ == "__main__":
  main(*sys.argv[1:])
