"""Common parts of all benchmarks.

`timing` measures in turns, `processes` starts and ends processes and exchanges
lines of JSON with them (`peer` is their side), `namespaces` shapes links, and
`setup` prepares a benchmark's config and model. Result files are written by
`caatnet.show.results`.
"""
