"""Transport between peers: frames, TLS, message channels and data links."""
