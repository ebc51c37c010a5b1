"""Links and processors of clients on one machine, emulated and measured.

As root, server and clients are in network namespaces
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
from parallel.base.naming import naming
from parallel.base.report import Table, keyed
from parallel.peers.emulation import (
  cpu_limits,
  link_probe,
  namespaces,
  relay,
)
from parallel.peers.transport.handshake import format_address
from parallel.plans.hardware.client_links import Link

RECORD = "links.json"
_LOOPBACK = "127.0.0.1"
# Time limit of clients without a server, short in case the server is killed.
_ALONE = "--config.federated.alone_s=10"
_MEASURED = ("measured_", "together_")  # prefixes of keys of rows
_MBIT = 1e6 / 8  # bytes


@dataclasses.dataclass(frozen=True)
class Emulation:
  """Emulated links and processors of a server and its clients.

  Attributes:
    means: One line that names the tools of the emulation.
    rows: Shaped and measured values of each client, plain data; [] if nothing
      is emulated.
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

  def listening(self) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which the server begins to listen."""
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
      with atomic.whole(service.workdir / RECORD) as temporary:
        temporary.write_text(files.to_json(record, indent=2) + "\n")
    addresses = [service.address] * len(self.prefixes)
    with contextlib.ExitStack() as stack:
      if self.relayed:
        addresses = stack.enter_context(
          relay.Relay(service.address, self.relayed)
        ).addresses
      clients = stack.enter_context(client_processes.Clients([
        [*prefix, *command, f"--server={format_address(own)}",
         f"--client={k}", _ALONE]
        for k, (prefix, own) in enumerate(
          zip(self.prefixes, addresses, strict=True)
        )
      ], service.workdir))
      service.serve(clients.check)

  def parts(self) -> list[str | Table]:
    """Returns `means` and a table of shaped and measured values."""
    return parts(self.means, self.rows)


def parts(means: str, rows: Sequence[Mapping[str, Any]]) -> list[str | Table]:
  """Returns `means` and a table of link rates; [] if nothing is emulated.

  Args:
    means, rows: Attributes of `Emulation`.
  """
  if not rows:
    return []
  return [means, Table(
    "shaped, measured alone, and measured while all clients of cells receive "
    "or send;\nrates of TCP's data; quotas in processors",
    keyed(["client", "link", "down, Mbit/s", "up, Mbit/s", "round trip, ms",
           "jitter, ms", "loss", "quota"]),
    [{
      "client": row["client"], "link": row.get("name", "-"),
      "down, Mbit/s": _texts(row, "down", "{:.4g}", _MBIT),
      "up, Mbit/s": _texts(row, "up", "{:.4g}", _MBIT),
      "round trip, ms": _texts(row, "rtt_s", "{:.1f}", 1e-3),
      "jitter, ms": _texts(row, "jitter_s", "{:.1f}", 1e-3),
      "loss": _texts(row, "loss", "{:.2%}"),
      "quota": _texts(row, "quota", "{:.2f}"),
    } for row in rows],
  )]


def check_none(federation: Any) -> None:
  """Raises ValueError if links or processors are to be emulated.

  For a server whose clients are on other machines; clients ignore these keys.
  """
  section = federation.section
  if section.links or section.cpu_quota:
    raise ValueError(
      f"config.federated.links={section.links} and cpu_quota="
      f"{section.cpu_quota:g} are emulated with --role=all only: must be () "
      "and 0"
    )


def _texts(
  row: Mapping[str, Any], key: str, form: str, unit: float = 1.0
) -> str:
  """Returns the shaped and the measured values of a key."""
  values = [row.get(f"{prefix}{key}") for prefix in ("", *_MEASURED)]
  return ", ".join(form.format(v / unit) for v in values if v is not None)


@contextlib.contextmanager
def emulated(
  federation: Any, host: str = _LOOPBACK
) -> Iterator[Emulation]:
  """Context manager of emulated links and processors, measured first.

  Args:
    federation: A `caatnet.config.federated.Federation`.
    host: Address for the server to listen at, without network namespaces.

  Raises:
    ValueError: The quota cannot be set, or has no effect.
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
        rows, links, link_probe.measured(links, host, namespace, prefixes),
        strict=True
      ):
        row |= dataclasses.asdict(link) | found
    if quota:
      with naming("config.federated", ("cpu_quota",)):
        groups = stack.enter_context(cpu_limits.limited(quota, num))
      means.append("quotas of processor time by control groups")
      for row, prefix, group in zip(rows, prefixes, groups, strict=True):
        row |= {"quota": quota, "measured_quota": group.measured}
        # First, since control groups are not visible inside a namespace.
        prefix[:0] = group.prefix
    yield Emulation(
      "; ".join(means), rows if means else [], host, namespace, prefixes,
      relayed,
    )
