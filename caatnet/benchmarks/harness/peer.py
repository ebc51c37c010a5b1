r"""Peer process: executes the orders that it reads from stdin.

  python -m caatnet.benchmarks.harness.peer PACKAGE.MODULE:CLASS ARGUMENT...

An order is a line of JSON: the name of a method and its keyword arguments. The
response is one, too: start and end of the method, in seconds of the machine's
monotonic clock, its processor time and its result. The process ends when its
stdin ends. Output of libraries to stdout goes to stderr.
"""

import importlib
import json
import os
import sys
import time
from typing import IO, Any


def serve(peer: Any, answers: IO[str]) -> None:
  """Executes orders until stdin ends, and writes the responses."""
  for line in sys.stdin:
    order, arguments = json.loads(line)
    method = getattr(peer, order)
    start, cpu_s = time.monotonic(), time.process_time()
    found = method(**arguments)
    end = time.monotonic()
    print(json.dumps({
      "start": start, "end": end, "cpu_s": time.process_time() - cpu_s,
      "found": found,
    }), file=answers, flush=True)


def main(kind: str, *arguments: str) -> None:
  """Creates the peer, and executes its orders."""
  # Responses keep the original stdout; file descriptor 1 becomes stderr.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  module, name = kind.split(":")
  serve(getattr(importlib.import_module(module), name)(*arguments), answers)


if __name__ == "__main__":
  main(*sys.argv[1:])
