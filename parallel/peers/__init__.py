"""Elastic training: peers join and leave a swarm during a run."""
