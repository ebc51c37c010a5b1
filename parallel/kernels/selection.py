"""Which implementation of an op runs, and why the others do not.

Every op has a ``reference`` in plain jnp, which is its specification, and
Pallas kernels "tpu" and "gpu". "tpu_interpret" and "gpu_interpret" run those
on any machine, slowly: for tests, and for looking at numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

NAMES = ("tpu", "gpu", "tpu_interpret", "gpu_interpret", "reference")

Implementation = str | Sequence[str]


class Choice(NamedTuple):
  """What runs.

  Attributes:
    name: One of ``NAMES``.
    refused: What was preferred to it -> why it does not run.
  """

  name: str
  refused: dict[str, str]

  @property
  def kind(self) -> str:
    """"tpu", "gpu" or "reference"."""
    return self.name.partition("_")[0]

  @property
  def interpret(self) -> bool:
    return self.name.endswith("_interpret")


def preference(
  implementation: Implementation, platform: str | None = None
) -> tuple[str, ...]:
  """What "auto" and single names mean, as a list of names.

  Args:
    implementation: "auto", a name, or names in order of preference. "auto" is
      the platform's kernel and then the reference; on CPUs the reference.
    platform: That the program is compiled for; None: of this process's
      default devices.

  Returns:
    Names, first choice first.

  Raises:
    ValueError: An unknown name.
  """
  if implementation == "auto":
    platform = platform or jax.default_backend()
    kernels = (platform,) if platform in ("tpu", "gpu") else ()
    return (*kernels, "reference")
  single = isinstance(implementation, str)
  names = (implementation,) if single else tuple(implementation)
  unknown = [name for name in names if name not in NAMES]
  if unknown or not names:
    raise ValueError(
      f"implementation={implementation!r} must be 'auto' or one or more of "
      f"{', '.join(NAMES)}"
    )
  return names


def choose(
  op: str,
  implementation: Implementation,
  refusal: Callable[[str], str | None],
) -> Choice:
  """The first implementation that takes the operands.

  Args:
    op: Name of the op, for the message.
    implementation: See `preference`.
    refusal: "tpu" or "gpu" -> why that kernel cannot take them; None: it can.

  Raises:
    ValueError: None of them can.
  """
  refused = {}
  for name in preference(implementation):
    choice = Choice(name, refused)
    reason = None if name == "reference" else refusal(choice.kind)
    if reason is None:
      return choice
    refused[name] = reason
  reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
  raise ValueError(f"{op}: no implementation is left ({reasons})")
