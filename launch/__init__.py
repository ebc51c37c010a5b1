"""Scripts, each of which is ``python -m launch.NAME`` or ``caatnet NAME``."""

import sys

from caatnet import interrupts

if sys.argv[0] == "-m":  # Python looks for the script; no import by a library
  interrupts.install()  # before the script's imports, which take seconds
