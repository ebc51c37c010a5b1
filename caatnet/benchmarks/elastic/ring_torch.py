"""Script that times torch's all-reduce over gloo, for `ring`.

It runs in a separate Python, which has torch, once per process of the group,
and imports nothing of this repository. It reads one line of JSON from stdin and
writes one to stdout, with the seconds of each sum.
"""

import json
import sys
import time


def main() -> None:
  """Joins the process group that stdin describes, and times all-reduces."""
  import torch
  from torch import distributed

  asked = json.loads(sys.stdin.readline())
  torch.set_num_threads(1)  # the processes share the machine's cores
  distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{asked['port']}",
    rank=asked["rank"], world_size=asked["count"],
  )
  seconds = []
  for _ in range(asked["rounds"] + 1):  # the first touches new memory
    x = torch.ones(asked["size"])
    distributed.barrier()
    start = time.perf_counter()
    distributed.all_reduce(x)
    seconds.append(time.perf_counter() - start)
    assert x.max() == x.min() == asked["count"]
  distributed.destroy_process_group()
  print(json.dumps({"torch": torch.__version__, "seconds": seconds[1:]}))


if __name__ == "__main__":
  main()
