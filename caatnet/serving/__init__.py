"""Serving: scheduling, paged cache, execution and HTTP server."""
