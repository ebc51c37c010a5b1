"""HTTP server with OpenAI's API, and a client that measures it."""
