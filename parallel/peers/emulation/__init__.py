"""Links and processors of several machines, emulated on one.

`namespaces` shapes links, and `wire` delays their packets, for root; `relay`
does both for streams. `link_probe` measures such links, `cpu_limits` limits
processor time, and `processes` starts what runs at the ends.
"""
