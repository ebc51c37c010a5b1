"""Links and processors of clients on one machine, emulated and measured.

With root privileges, server and clients run in network namespaces
(`parallel.peers.emulation.namespaces.star`). Otherwise a relay
(`parallel.peers.emulation.relay`) delays the bytes of their connections.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

from caatnet.federated import processes as client_processes
from caatnet.federated.service import Service
from parallel.base import atomic, files
from parallel.base.naming import prefix_error_keys
from parallel.base.report import Table, columns_of_keys
from parallel.peers.emulation import (
  cpu_limits,
  link_probe,
  namespaces,
  relay,
)
from parallel.peers.transport.handshake import format_address
from parallel.plans.hardware.client_links import Link

LINKS_FILE = "links.json"
_LOOPBACK = "127.0.0.1"
# Time limit of clients without a server, short in case the server is killed.
_NO_SERVER_FLAG = "--config.federated.alone_s=10"
_MEASURED_PREFIXES = ("measured_", "together_")  # prefixes of keys of rows
_MBIT = 1e6 / 8  # bytes


@dataclasses.dataclass(frozen=True)
class Emulation:
  """Emulated links and processors of a server and its clients.

  Attributes:
    means: One line that names the tools of the emulation.
    rows: Configured and measured link and processor quota of each client, as
      plain data; [] if nothing is emulated.
    host: Address for the server to listen at.
    namespace: Network namespace of the server; "" for that of this process.
    prefixes: Command prefix of each client, e.g. to enter its namespace.
    relayed: Link of each client that a relay emulates; () for no relay.
  """

  means: str
  rows: Sequence[dict[str, Any]]
  host: str
  namespace: str
  prefixes: Sequence[Sequence[str]]
  relayed: Sequence[Link]

  def listening_context(self) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that enters the server's network namespace."""
    if self.namespace:
      return namespaces.inside(self.namespace)
    return contextlib.nullcontext()

  def serve(self, service: Service, command: Sequence[str]) -> None:
    """Runs a server, with its clients as processes, until the run ends.

    Args:
      service: The server, which listens.
      command: Command of a client, without its id and the server's address.

    Raises:
      ValueError: A client has failed.
    """
    if self.rows:
      record = {"means": self.means, "clients": list(self.rows)}
      with atomic.atomic_file(service.workdir / LINKS_FILE) as temporary:
        temporary.write_text(files.to_json(record, indent=2) + "\n")
    addresses = [service.address] * len(self.prefixes)
    with contextlib.ExitStack() as stack:
      if self.relayed:
        addresses = stack.enter_context(
          relay.Relay(service.address, self.relayed)
        ).addresses
      clients = stack.enter_context(client_processes.Clients([
        [*prefix, *command, f"--server={format_address(own)}",
         f"--client={k}", _NO_SERVER_FLAG]
        for k, (prefix, own) in enumerate(
          zip(self.prefixes, addresses, strict=True)
        )
      ], service.workdir))
      service.serve(clients.check)

  def parts(self) -> list[str | Table]:
    """Returns the parts of a report: `means`, and a table of `rows`."""
    return build_report_parts(self.means, self.rows)


def build_report_parts(
  means: str, rows: Sequence[Mapping[str, Any]]
) -> list[str | Table]:
  """Returns the parts of an emulation's report; [] if nothing is emulated.

  Args:
    means, rows: Attributes of `Emulation`.
  """
  if not rows:
    return []
  return [
    means,
    Table(
      "shaped, measured alone, and measured while all clients of cells receive "
      "or send;\nrates of TCP's data; quotas in processors",
      columns_of_keys(
        [
          "client", "link", "down, Mbit/s", "up, Mbit/s", "round trip, ms",
          "jitter, ms", "loss", "quota",
        ]
      ),
      [
        {
          "client": row["client"], "link": row.get("name", "-"),
          "down, Mbit/s": _format_values(row, "down", "{:.4g}", _MBIT),
          "up, Mbit/s": _format_values(row, "up", "{:.4g}", _MBIT),
          "round trip, ms": _format_values(row, "rtt_s", "{:.1f}", 1e-3),
          "jitter, ms": _format_values(row, "jitter_s", "{:.1f}", 1e-3),
          "loss": _format_values(row, "loss", "{:.2%}"),
          "quota": _format_values(row, "quota", "{:.2f}"),
        }
        for row in rows
      ],
    ),
  ]


def check_not_emulated(federation: Any) -> None:
  """Raises ValueError if the config asks for emulated links or processors.

  For a server whose clients are on other machines, which cannot be emulated.
  """
  section = federation.section
  if section.links or section.cpu_quota:
    raise ValueError(
      f"config.federated.links={section.links} and cpu_quota="
      f"{section.cpu_quota:g} are emulated with --role=all only: must be () "
      "and 0"
    )


def _format_values(
  row: Mapping[str, Any], key: str, form: str, unit: float = 1.0
) -> str:
  """Formats a key's configured and measured values, separated by commas.

  Values of the row are divided by ``unit`` and formatted by ``form``.
  """
  values = [row.get(f"{prefix}{key}") for prefix in ("", *_MEASURED_PREFIXES)]
  return ", ".join(form.format(v / unit) for v in values if v is not None)


@contextlib.contextmanager
def start_emulation(
  federation: Any, host: str = _LOOPBACK
) -> Iterator[Emulation]:
  """Context manager that emulates and measures links and processors.

  Args:
    federation: A `caatnet.config.federated.Federation`.
    host: Address for the server to listen at, without network namespaces.

  Raises:
    ValueError: The processor quota cannot be set, or has no effect.
  """
  links, quota = federation.links, federation.section.cpu_quota
  num = federation.section.clients
  rows: list[dict[str, Any]] = [{"client": k} for k in range(num)]
  prefixes: list[list[str]] = [[] for _ in range(num)]
  means, namespace, relayed = [], "", ()
  with contextlib.ExitStack() as stack:
    if links:
      try:
        star = stack.enter_context(namespaces.star(links))
      except ValueError as error:
        relayed, host = links, _LOOPBACK
        means.append(
          "links by a relay of the transport, where TCP's slow start sees no "
          f"long round trip: {error}"
        )
      else:
        host, namespace, prefixes = star.host, star.server, star.prefixes
        means.append(
          "links by network namespaces: rates by htb, delays and losses by a "
          "TUN forwarder, TCP (Reno) from end to end"
        )
      for row, link, found in zip(
        rows, links, link_probe.measure_links(links, host, namespace, prefixes),
        strict=True
      ):
        row |= dataclasses.asdict(link) | found
    if quota:
      with prefix_error_keys("config.federated", ("cpu_quota",)):
        groups = stack.enter_context(cpu_limits.limited_groups(quota, num))
      means.append("quotas of processor time by control groups")
      for row, prefix, group in zip(rows, prefixes, groups, strict=True):
        row |= {"quota": quota, "measured_quota": group.measured}
        # First, since control groups are not visible inside a namespace.
        prefix[:0] = group.prefix
    yield Emulation(
      "; ".join(means), rows if means else [], host, namespace, prefixes,
      relayed,
    )
