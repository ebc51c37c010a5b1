"""Terminal output of a server and of its load generator."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import ipaddress
import socket
from typing import Any

from rich.console import Console
from rich.progress import Progress, track

from caatnet.show.tables import print_table

_CONSOLE = Console(highlight=False, soft_wrap=True)


def run_with_progress(steps: Iterable[Any], count: int) -> None:
  """Runs ``count`` compilation steps, with a progress bar on stderr."""
  for _ in track(
    steps, "compiling programs", total=count, transient=True,
    console=Console(stderr=True),
  ):
    pass


def say(line: str) -> None:
  """Prints a line."""
  _CONSOLE.print(line, markup=False, emoji=False)


def announce(
  name: str, listener: socket.socket, has: dict[str, Any], chosen: Any,
  has_key: bool,
) -> None:
  """Prints a server's address and capacity.

  Warns if other machines can reach the server and need no key.

  Args:
    name: Name of the model.
    listener: Listening socket.
    has: Result of `caatnet.config.serving.describe`.
    chosen: ``config.serving``.
    has_key: Whether clients must send a key.
  """
  # The actual port, also with --port=0.
  host, port = listener.getsockname()[:2]
  is_local = ipaddress.ip_address(host).is_loopback
  host = f"[{host}]" if ":" in host else host  # IPv6
  _CONSOLE.print(
    f"[bold]{name}[/bold] at [bold cyan]http://{host}:{port}[/bold cyan]: "
    "/v1, a page at /, /metrics, /health"
  )
  parts = []
  if has["pages"]:
    parts.append(f"{has['pages']:,} pages of {has['page_size']}")
  if has["states"]:
    parts.append(f"{has['states']:,} states")
  say(
    f"{has['slots']} slots, context {has['context']:,}, {' and '.join(parts)} "
    f"({has['cache_gb']:.2f} GB), {has['host_pages']:,} "
    f"on the host ({has['host_gb']:.2f} GB); {chosen.policy}, preempt="
    f"{chosen.preempt}, queue {chosen.queue:,}"
  )
  if not (is_local or has_key):
    say(
      "warning: any machine that reaches this address can use the server; "
      "--api_key_file or CAATNET_API_KEY sets a key"
    )


def show_times(result: dict[str, Any]) -> None:
  """Prints the result of `caatnet.serving.server.client.summary`."""
  measures = result["measures"]
  columns = list(measures["TTFT"])
  print_table(
    f"{result['requests']:,} requests, {result['tokens']:,} tokens, "
    f"{result['tokens_per_second']:,.0f} tokens/s; milliseconds",
    ["", *columns],
    [
      [name, f"{of['n']:,}", *(f"{1e3 * of[c]:,.1f}" for c in columns[1:])]
      for name, of in measures.items()
    ],
  )
  for error in result["errors"][:5]:
    say(f"failed: {error}")
  if result["errors"]:
    say(f"{len(result['errors']):,} requests failed")


@contextlib.contextmanager
def show_answer_progress(
  policy: str,
) -> Iterator[tuple[Callable[[int, int], None], Callable[[], None]]]:
  """Shows on stderr how many requests of a load test have been answered.

  Args:
    policy: Policy of the server that this command starts; "" for a server that
      is running already.

  Yields:
    The arguments ``begun`` and ``on_end`` of `replay` in
    `caatnet.serving.server.load`.
  """
  with Progress(transient=True, console=Console(stderr=True)) as bar:
    text = f"starting a server, {policy}" if policy else "answers"
    task = bar.add_task(text, total=None)

    def begun(number: int, left_out: int) -> None:
      bar.update(task, description=f"answers {policy}".strip(), total=number)
      if left_out:
        bar.console.print(
          f"{left_out:,} of {left_out + number:,} requests are longer than the "
          "model's context and are not sent", highlight=False,
        )

    yield begun, lambda: bar.advance(task)


def show_replay(
  results: Mapping[str, Mapping[str, Any]], asked: float
) -> None:
  """Prints results of the same requests with one or several policies.

  Args:
    results: Policy -> result of `caatnet.serving.server.client.summary`.
    asked: Requested rate in requests per second; 0 for the times of a trace.
  """
  if len(results) == 1:
    (result,) = results.values()
    show_times(result)
    _show_rate(asked, result)
    return
  first = next(iter(results.values()))
  print_table(
    f"{first['requests']:,} requests, the same for each policy; milliseconds",
    ["policy", "tokens/s", "TTFT P50", "TTFT P99", "TPOT mean", "TPOT P99",
     "failed"],
    [
      [policy, f"{of['tokens_per_second']:,.0f}", *(
        f"{1e3 * of['measures'][name][column]:,.1f}" for name, column in (
          ("TTFT", "P50"), ("TTFT", "P99"), ("TPOT", "mean"), ("TPOT", "P99")
        )
      ), str(len(of["errors"]))]
      for policy, of in results.items()
    ],
  )
  for policy, result in results.items():
    _show_rate(asked, result, f"{policy}: ")


def _show_rate(
  asked: float, result: Mapping[str, Any], head: str = ""
) -> None:
  """Prints the sent requests per second; warns below half of ``asked``."""
  sent = result["sent_per_second"]
  line = f"{head}{sent:.3g} requests/s were sent"
  if asked:
    line += f", {asked:g} asked for"
  if sent < asked / 2:
    line += (
      ": warning: turns of a conversation wait for the answer before them and "
      "for --think_s; use more --sessions, or less --max_tokens or --think_s"
    )
  say(line)
