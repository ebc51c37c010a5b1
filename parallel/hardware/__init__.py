"""Hardware data: devices, links, slices, clusters and sites, with sources."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "cluster_files": ["cluster", "from_json", "to_json"],
  "cluster_imports": ["from_nccl", "from_topo"],
  "clusters": ["CLUSTERS", "Cluster", "Level"],
  "devices": ["DEVICES", "Device"],
  "link_matrix": ["LinkMatrix"],
  "links": ["KINDS", "LinkKind"],
  "nodes": ["NODES", "Node"],
  "sites": ["SITES", "Site"],
  "slices": ["SLICES"],
  "tiers": ["HOSTS", "Host", "Tier"],
})
