"""Hardware data: devices, links, slices, clusters and sites, with sources."""
