"""Import and export of schedules as MSCCL's XML."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "exporter": ["export_xml"],
  "importer": ["import_xml"],
})
