"""Links and processors of several machines, emulated on one.

With root privileges, `namespaces` limits the rates of links, and `wire` delays
their packets. Without root, `relay` does both for TCP streams. `link_probe`
measures such links, `cpu_limits` limits processor time, and `processes` starts
the programs at the ends of the links.
"""
