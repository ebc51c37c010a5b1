"""Terminal output of a server and of its load generator."""

from collections.abc import Iterable
import ipaddress
import socket
from typing import Any

from rich.console import Console
from rich.progress import track

from caatnet.show.tables import table

_CONSOLE = Console(highlight=False, soft_wrap=True)


def progress(steps: Iterable[Any], count: int) -> None:
  """Iterates over compilation steps with a progress bar."""
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
  table(
    f"{result['requests']:,} requests, {result['tokens']:,} tokens, "
    f"{result['tokens_per_second']:,.0f} tokens/s; milliseconds",
    ["", *columns],
    [
      [name, f"{of['n']:,}", *(f"{1e3 * of[c]:,.1f}" for c in columns[1:])]
      for name, of in measures.items()
    ],
  )
  if result.get("left_out"):
    say(f"{result['left_out']:,} requests are longer than the model's context")
  for error in result["errors"][:5]:
    say(f"failed: {error}")
  if result["errors"]:
    say(f"{len(result['errors']):,} requests failed")
