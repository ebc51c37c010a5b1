"""Scripts, each of which is ``python -m launch.NAME`` or ``caatnet NAME``."""

import sys

from caatnet import interrupts

if sys.argv[0] == "-m":  # Python is looking for the script, not for a library
  interrupts.install()  # before imports, which take seconds
