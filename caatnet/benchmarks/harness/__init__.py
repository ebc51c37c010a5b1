"""Common parts of all benchmarks.

`timing` alternates measurements. `scripts` runs scripts of other Pythons, and
functions in fresh processes; `environments` makes environments of other
projects. `setup` prepares a benchmark's config. `parallel.peers.emulation`
starts peers and shapes links. `caatnet.show.results` writes result files.
"""
