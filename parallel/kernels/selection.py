"""Selection of the implementation of an op, with reasons for rejected ones.

Every op has a "reference" in plain jnp, which is its specification, and Pallas
kernels "tpu" or "gpu" or both; an op may define others. "tpu_interpret" and
"gpu_interpret" interpret these kernels on any machine, which is slow and
intended for tests and for inspecting values.

On several devices, jax 0.10's interpreter of TPU kernels deadlocks if a block
has 100 KiB or more and XLA's thread pool is not larger than the number of
devices: each device occupies a thread, and such blocks are copied by another
thread. XLA uses one thread per core, or the number in the environment variable
NPROC, which the scripts in ``launch/`` set.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

# Platform -> names of the kernels of an op on it, in order of preference.
KernelNames = Mapping[str, Sequence[str]]
KERNELS: KernelNames = {"tpu": ("tpu",), "gpu": ("gpu",)}

# Suffix of a kernel's name to run it in the interpreter.
_INTERPRET = "_interpret"

# "auto", a name, or names in order of preference.
Implementation = str | Sequence[str]


class SelectedKernel(NamedTuple):
  """Selected implementation of an op.

  Attributes:
    name: Name of a kernel, with "_interpret" if it is interpreted, or
      "reference".
    refused: Implementation with a higher preference -> reason for its
      rejection.
  """

  name: str
  refused: dict[str, str]

  @property
  def kind(self) -> str:
    """Name of the kernel without "_interpret", or "reference"."""
    return self.name.removesuffix(_INTERPRET)

  @property
  def interpret(self) -> bool:
    """Whether the kernel is interpreted instead of compiled."""
    return self.name.endswith(_INTERPRET)


def preference(
  implementation: Implementation,
  platform: str | None = None,
  kernels: KernelNames = KERNELS,
) -> tuple[str, ...]:
  """Expands "auto", a name or several names to a tuple of names.

  Args:
    implementation: "auto", a name, or names in order of preference. "auto"
      expands to the platform's kernels followed by the reference; on CPUs, for
      most ops, to the reference only.
    platform: Platform that the program is compiled for; None for the default
      backend of this process.
    kernels: Kernels of the op by platform.

  Returns:
    Names in order of preference.

  Raises:
    ValueError: A name is unknown, or no name is given.

  Example:
    >>> preference("auto", "tpu"), preference("auto", "cpu")
    (('tpu', 'reference'), ('reference',))
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
  kernels: KernelNames = KERNELS,
) -> SelectedKernel:
  """Returns the first preferred implementation that supports the operands.

  Args:
    op: Name of the op, for the error message.
    implementation: "auto", a name, or names in order of preference.
    refusal: Function from a kernel's name to the reason why it does not support
      the operands, or None if it does. The reference supports any operands.
    kernels: Kernels of the op by platform.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.

  Example:
    >>> odd = lambda kernel: "width=100: a multiple of 128"
    >>> choose("add_norm", ["tpu", "reference"], odd)
    SelectedKernel(name='reference', refused={'tpu': 'width=100: a multiple of
    128'})
  """
  refused = {}
  for name in preference(implementation, kernels=kernels):
    choice = SelectedKernel(name, refused)
    # The reference has no restrictions, so that it is never rejected.
    reason = None if name == "reference" else refusal(choice.kind)
    if reason is None:
      return choice
    refused[name] = reason
  reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
  raise ValueError(f"{op}: no implementation can be used ({reasons})")
