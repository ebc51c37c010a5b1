"""Client processes: their output, failures and end."""

import signal
import sys

import pytest

from caatnet.federated import processes

FAILS = "import sys; print(sys.argv[1]); sys.exit(3 * ('1' in sys.argv[1]))"


def test_failed_process_is_named_with_its_last_line(tmp_path):
  commands = [
    [sys.executable, "-c", FAILS, f"--client={client}"] for client in range(2)
  ]
  with processes.Clients(commands, tmp_path) as clients:
    for process in clients._processes:
      process.wait(30)
    with pytest.raises(ValueError, match="client 1 ended with code 3: --clien"):
      clients.check()
  for client in range(2):
    text = (tmp_path / f"client-{client}.log").read_text()
    assert text == f"--client={client}\n"


def test_processes_are_terminated_with_a_server_that_fails(tmp_path):
  command = [sys.executable, "-c", "import time; time.sleep(60)"]
  clients = processes.Clients([command] * 2, tmp_path)

  def serve():
    with clients:
      clients.check()  # both are running
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    serve()
  codes = [process.returncode for process in clients._processes]
  assert codes == [-signal.SIGTERM] * 2
