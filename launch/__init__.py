"""Scripts, each of which is ``python -m launch.NAME`` or ``caatnet NAME``."""

import sys

from caatnet import interrupts

if sys.argv[0] == "-m":  # started as a script, not imported by a library
  interrupts.install()  # before the script's imports, which take seconds
