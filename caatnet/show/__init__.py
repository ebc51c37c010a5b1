"""Tables, pictures and files of results."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "documents": ["rewritten"],
  "pictures": ["plot_losses", "plot_study", "plot_sweep"],
  "results": ["write"],
  "tables": ["print_sweep", "table"],
})
