"""Memory and communication of ZeRO partitions."""
