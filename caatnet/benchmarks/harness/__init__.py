"""Common parts of all benchmarks.

`timing` alternates measurements. `processes` starts and ends processes and
exchanges lines of JSON with them; `peer` is the other end, and `sockets`
connects them. `namespaces` shapes links, and `wire` delays their packets;
`relay` does both for streams, without root. `memory_limits` and `cpu_limits`
limit processes by `cgroups`. `environments` makes environments of other
projects. `setup` prepares a benchmark's config.
`caatnet.show.results` writes result files.
"""
