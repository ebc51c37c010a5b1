"""Session of the comparison with Flower: commands, ports and counted bytes."""

import subprocess

import pytest

from caatnet import commands
from caatnet.benchmarks.foreign import flower_session

DEVICES = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    pack
    lo: {0} 7 0 0 0 0 0 0 {0} 7 0 0 0 0 0 0
{1}"""


@pytest.mark.parametrize(("loopback", "others", "expected"), [
  (500, [], 500), (0, [(30, 4)], 34), (100, [(1, 2), (3000, 50)], 3153),
])
def test_bytes_are_counted_once_on_loopback_and_in_both_directions(
  tmp_path, loopback, others, expected
):
  lines = "".join(
    f"  dev{i}: {received} 7 0 0 0 0 0 0 {sent} 8 0 0 0 0 0 0\n"
    for i, (received, sent) in enumerate(others)
  )
  path = tmp_path / "dev"
  path.write_text(DEVICES.format(loopback, lines))
  # A prefix that replaces the command and its file.
  prefix = ["sh", "-c", f"cat {path}"]
  assert flower_session._device_bytes(prefix) == expected
  with pytest.raises(subprocess.CalledProcessError):
    flower_session._device_bytes(["false"])


def test_server_has_the_options_of_the_run():
  command = flower_session._ours({
    "clients": 3, "rounds": 5, "evaluate": False, "folder": "/f",
  }, "10.0.0.1")
  assert command[:4] == commands.spawned("federate")
  assert {
    "--role=server", "--host=10.0.0.1", "--port=7100", "--workdir=/f/run",
    "--config.federated.clients=3", "--config.federated.per_round=3",
    "--config.federated.rounds=5", "--config.federated.validate=False",
    "--config.federated.outlier_factor=0.0",  # no check, as in Flower
  } <= {*command}


def test_server_that_ends_does_not_listen(monkeypatch):
  with (
    subprocess.Popen(["false"]) as process,
    pytest.raises(ValueError, match="does not listen: code 1"),
  ):
    flower_session._wait_for_server(process, ["sh", "-c", "true"])
  # State 0A of the local port 7100; one that is only connected has another.
  listens = "1: 0100007F:1BBC 00000000:0000 0A x"
  with subprocess.Popen(["sleep", "60"]) as process:
    monkeypatch.setattr(flower_session, "_LISTEN_S", 0.2)
    try:
      flower_session._wait_for_server(
        process, ["sh", "-c", f"echo '{listens}'"]
      )
      with pytest.raises(ValueError, match="does not listen: code None"):
        flower_session._wait_for_server(
          process, ["sh", "-c", f"echo '{listens.replace('0A', '01')}'"]
        )
    finally:
      process.kill()
