"""Common parts of all benchmarks.

`timing` measures in turns. `processes` starts and ends processes and exchanges
lines of JSON with them; `peer` is their side, and `sockets` connects them.
`namespaces` shapes links, for which `wire` delays packets. `setup` prepares a
benchmark's config. Result files are written by `caatnet.show.results`.
"""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "processes": ["Peers", "Process"],
})
