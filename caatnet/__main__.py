"""Entry point: ``python -m caatnet NAME`` is ``caatnet NAME``."""

from caatnet import commands

if __name__ == "__main__":
  commands.main()
