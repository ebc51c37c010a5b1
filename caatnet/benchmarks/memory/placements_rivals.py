"""Placements by accelerate and memory by DeepSpeed, in a separate Python.

The script reads a line of JSON from stdin: "problems", each with the bytes of a
layer by tensor, the number of layers, and the bytes of each tier; and the
"parameters" of a model and of its largest layer. It writes one: "versions";
"layers", for each problem the layers that `infer_auto_device_map` assigns to
each tier, null if some are assigned to "disk"; and "estimates", DeepSpeed's
host and device bytes by the kind of offload.
"""

import contextlib
import json
import sys


def main() -> None:
  """Answers one line of stdin."""
  question = json.loads(sys.stdin.readline())
  with contextlib.redirect_stdout(sys.stderr):  # libraries print there
    import accelerate
    from accelerate.utils import infer_auto_device_map
    import deepspeed
    from deepspeed.runtime.zero.stage3 import (
      estimate_zero3_model_states_mem_needs as estimate,
    )
    import torch

    class Layer(torch.nn.Module):
      """Layer whose parameters are all of its tensors on the host."""

      def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        for i, size in enumerate(sizes):
          self.register_parameter(f"x{i}", torch.nn.Parameter(
            torch.empty(size, dtype=torch.int8, device="meta"), False
          ))

    def layers(problem: dict) -> list[int] | None:
      sizes, count = problem["sizes"], problem["layers"]
      # Tiers are its accelerators 0, 1, ...: it fills those in order.
      found = infer_auto_device_map(
        torch.nn.ModuleList(Layer(sizes) for _ in range(count)),
        max_memory=dict(enumerate(problem["tiers"])),
        no_split_module_classes=["Layer"], clean_result=False,
      )
      tiers = list(found.values())
      assert len(tiers) == count, found
      if "disk" in tiers:
        return None
      return [tiers.count(i) for i in range(len(problem["tiers"]))]

    answer = {
      "versions": {
        "accelerate": accelerate.__version__,
        "deepspeed": deepspeed.__version__, "torch": torch.__version__,
      },
      "layers": [layers(problem) for problem in question["problems"]],
      "estimates": [
        {"optimizer": optimizer, "weights": weights, "buffers": factor}
        | dict(zip(("host", "device"), estimate(
          *question["parameters"], cpu_offload=optimizer,
          cpu_offload_params=weights, additional_buffer_factor=factor,
        ), strict=False))
        for factor in (1.0, 1.5)
        for optimizer, weights in ((True, True), (True, False), (False, False))
      ],
    }
  print(json.dumps(answer))


if __name__ == "__main__":
  main()
