"""Printed state of a server and times of its load generator."""

import importlib.util
import socket
import types

import pytest

from caatnet.show import servers
from tests.caatnet.show import terminal

HAS = {"pages": 1234, "page_size": 16, "states": 0, "slots": 8,
       "context": 4096, "cache_gb": 1.256, "host_pages": 5000, "host_gb": 2.5}
CHOSEN = types.SimpleNamespace(policy="vtc", preempt="swap", queue=1000)


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
  kind = socket.AF_INET6 if ":" in request.param else socket.AF_INET
  try:
    made = socket.create_server((request.param, 0), family=kind)
  except OSError:
    pytest.skip("no IPv6 here")
  with made:
    yield made


@pytest.mark.parametrize(("pages", "states", "text"), [
  (1234, 0, "1,234 pages of 16"), (0, 5678, "5,678 states"),
  (2, 1, "2 pages of 16 and 1 states"),
])
def test_address_and_capacity_are_announced(
  capsys, listener, pages, states, text
):
  host, port = listener.getsockname()[:2]
  host = {"::1": "[::1]"}.get(host, host)
  servers.announce(
    "model", listener, HAS | {"pages": pages, "states": states}, CHOSEN, False
  )
  assert capsys.readouterr().out == (
    f"model at http://{host}:{port}: /v1, a page at /, /metrics, /health\n"
    f"8 slots, context 4,096, {text} (1.26 GB), 5,000 on the host (2.50 GB); "
    "vtc, preempt=swap, queue 1,000\n"
  )


@pytest.mark.parametrize(("host", "has_key", "warns"), [
  ("0.0.0.0", False, True), ("0.0.0.0", True, False),
  ("127.0.0.2", False, False),
])
def test_address_that_others_reach_without_a_key_is_a_warning(
  capsys, host, has_key, warns
):
  with socket.create_server((host, 0)) as listener:
    servers.announce("model", listener, HAS, CHOSEN, has_key)
  lines = capsys.readouterr().out.splitlines()
  assert [line.startswith("warning: any machine") for line in lines] == (
    [False, False] + [True] * warns
  )
  assert not warns or "CAATNET_API_KEY" in lines[-1]


def test_lines_are_printed_whole_and_without_markup(capsys):
  line = "[bold]x[/bold] " * 20
  servers.say(line)
  assert capsys.readouterr().out == f"{line}\n"


def test_terminal_emphasises_only_name_and_address(monkeypatch, listener):
  """Numbers are not coloured, as rich does by default."""
  out = terminal.attach(monkeypatch, "stdout")
  spec = importlib.util.find_spec(servers.__name__)
  fresh = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(fresh)  # its console is made on this terminal
  fresh.announce("model", listener, HAS, CHOSEN, True)
  first, second = out.getvalue().splitlines()
  assert first.startswith("\x1b[1mmodel\x1b[0m at \x1b[1;36mhttp://")
  assert first.count("\x1b") == 4
  assert "\x1b" not in second


def test_programs_are_counted_on_a_terminal(monkeypatch, capsys):
  done = []
  servers.run_with_progress((done.append(i) for i in range(3)), 3)
  assert done == [0, 1, 2]
  assert "programs" not in capsys.readouterr().err  # a log gets no bar
  error = terminal.attach(monkeypatch)
  servers.run_with_progress((done.append(i) for i in range(4)), 4)
  assert done == [0, 1, 2, 0, 1, 2, 3]
  assert "compiling programs" in error.text
  assert error.text.rstrip().endswith("100% 0:00:00")
  # The bar is removed at the end.
  assert error.getvalue().endswith("\x1b[2K")
  assert capsys.readouterr().out == ""


def times(**more):
  rows = {"TTFT": 0.5, "TPOT": 0.001, "end to end": 2.5}
  return {
    "requests": 1500, "tokens": 20_000, "tokens_per_second": 1234.6,
    "measures": {
      name: {"n": 1000 + i, "mean": value, "p99": 2 * value}
      for i, (name, value) in enumerate(rows.items())
    },
    "errors": [], **more,
  }


def test_times_are_in_milliseconds(capsys):
  servers.show_times(times())
  out = capsys.readouterr().out
  assert terminal.tables(out) == {
    "1,500 requests, 20,000 tokens, 1,235 tokens/s; milliseconds": [
      ["", "n", "mean", "p99"],
      ["TTFT", "1,000", "500.0", "1,000.0"],
      ["TPOT", "1,001", "1.0", "2.0"],
      ["end to end", "1,002", "2,500.0", "5,000.0"],
    ],
  }
  assert out.splitlines()[-1].startswith("└")  # nothing has failed


def test_first_five_errors_and_their_number_are_shown(capsys):
  errors = [f"[{i}]" for i in range(6)]
  servers.show_times(times(errors=errors))
  lines = capsys.readouterr().out.splitlines()
  assert lines[-6:] == [
    *(f"failed: [{i}]" for i in range(5)), "6 requests failed",
  ]


def test_policies_are_rows_of_a_comparison(capsys):
  columns = {"P50": 0.25, "P99": 0.5, "mean": 0.125}
  measures = {"TTFT": columns, "TPOT": {c: x / 2 for c, x in columns.items()}}
  servers.show_replay({
    "vtc": times(measures=measures, sent_per_second=3.0), "dlpm": times(
      measures=measures | {"TTFT": columns | {"P99": 7.0}}, errors=["lost"],
      sent_per_second=1.5,
    ),
  }, 3.5)
  out = capsys.readouterr().out
  assert "\nvtc: 3 requests/s were sent, 3.5 asked for\n" in out
  assert "\ndlpm: 1.5 requests/s were sent, 3.5 asked for: warning: " in out
  assert terminal.tables(out) == {
    "1,500 requests, the same for each policy; milliseconds": [
      ["policy", "tokens/s", "TTFT P50", "TTFT P99", "TPOT mean", "TPOT P99",
       "failed"],
      ["vtc", "1,235", "250.0", "500.0", "62.5", "250.0", "0"],
      ["dlpm", "1,235", "250.0", "7,000.0", "62.5", "250.0", "1"],
    ],
  }


def test_rate_below_half_of_the_asked_one_is_a_warning(capsys):
  for asked, sent, text in (
    (0.0, 2.0, "2 requests/s were sent\n"),
    (4.0, 2.0, "2 requests/s were sent, 4 asked for\n"),
    (4.0, 1.9, "1.9 requests/s were sent, 4 asked for: warning: turns"),
  ):
    servers.show_replay({"": times(sent_per_second=sent)}, asked)
    assert text in capsys.readouterr().out
