"""Programs compiled with the options that users get.

`tests/conftest.py` disables XLA:CPU's fusion emitters, which saves time. Other
instructions and other temporaries result: 352 bytes instead of 16 for a scatter
into a donated array. Tests that read a compiled program (its text, memory or
FLOPs) compile it here. The other flags of `tests/conftest.py` act after HLO
passes and buffer assignment, and so change neither.
"""

import importlib.metadata

# jaxlib 0.12 has no other emitters, and refuses the option.
HAS_OPTION = importlib.metadata.version("jaxlib").startswith("0.10.")
OPTIONS = {"xla_cpu_use_fusion_emitters": True} if HAS_OPTION else {}


def compiled(lowered):
  """Compiles a ``jax.stages.Lowered`` as outside of the tests."""
  return lowered.compile(compiler_options=OPTIONS)
