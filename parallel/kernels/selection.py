"""Chooses the implementation of an op and says why others were refused.

Every op has a "reference" in plain jnp, which is its specification, and Pallas
kernels "tpu" or "gpu" or both; an op may name others. "tpu_interpret" and
"gpu_interpret" interpret these kernels on any machine. That is slow, and meant
for tests and for looking at numbers.

On several devices jax 0.10's interpreter of TPU kernels waits forever if a
block has 100 KiB or more and XLA no more threads than there are devices: each
device holds a thread, and such blocks are copied in another one. XLA has a
thread per core, or as many as the environment variable NPROC says, which the
scripts of ``launch/`` set.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

# The kernels of an op by the platform they run on, first choice first.
Kernels = Mapping[str, Sequence[str]]
KERNELS: Kernels = {"tpu": ("tpu",), "gpu": ("gpu",)}

_INTERPRET = "_interpret"

Implementation = str | Sequence[str]


class Choice(NamedTuple):
  """The implementation that runs.

  Attributes:
    name: A kernel, a kernel interpreted, or "reference".
    refused: Maps each implementation that was preferred to this one to the
      reason why it does not run.
  """

  name: str
  refused: dict[str, str]

  @property
  def kind(self) -> str:
    """The name without "_interpret": a kernel or "reference"."""
    return self.name.removesuffix(_INTERPRET)

  @property
  def interpret(self) -> bool:
    """Whether the kernel is interpreted instead of compiled."""
    return self.name.endswith(_INTERPRET)


def preference(
  implementation: Implementation,
  platform: str | None = None,
  kernels: Kernels = KERNELS,
) -> tuple[str, ...]:
  """Turns "auto", a name or several names into a list of names.

  Args:
    implementation: "auto", a name, or names in order of preference. "auto"
      stands for the platform's kernels and then the reference, and on CPUs for
      the reference alone.
    platform: The platform that the program is compiled for; None takes that of
      this process's default devices.
    kernels: The kernels of the op.

  Returns:
    Names in order of preference, first choice first.

  Raises:
    ValueError: A name is unknown, or there is none.
  """
  if implementation == "auto":
    platform = platform or jax.default_backend()
    return (*kernels.get(platform, ()), "reference")
  single = isinstance(implementation, str)
  names = (implementation,) if single else tuple(implementation)
  compiled = [name for found in kernels.values() for name in found]
  known = [*compiled, *(name + _INTERPRET for name in compiled), "reference"]
  if not names or not set(names) <= set(known):
    raise ValueError(
      f"implementation={implementation!r} must be 'auto' or one or more of "
      f"{', '.join(known)}"
    )
  return names


def choose(
  op: str,
  implementation: Implementation,
  refusal: Callable[[str], str | None],
  kernels: Kernels = KERNELS,
) -> Choice:
  """Returns the first preferred implementation that takes the operands.

  Args:
    op: Name of the op, for the error message.
    implementation: "auto", a name, or names in order of preference.
    refusal: Maps a kernel to the reason why it cannot take the operands, or to
      None if it can. The reference takes any operands.
    kernels: The kernels of the op.

  Raises:
    ValueError: A name is unknown, or no preferred implementation takes the
      operands.
  """
  refused = {}
  for name in preference(implementation, kernels=kernels):
    choice = Choice(name, refused)
    reason = None if name == "reference" else refusal(choice.kind)
    if reason is None:
      return choice
    refused[name] = reason
  reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
  raise ValueError(f"{op}: no implementation is left ({reasons})")
