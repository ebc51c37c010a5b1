"""Transport between peers: frames, TLS, message channels and data links."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "channel": ["Channel"],
  "frames": ["FrameError", "Header", "Kind"],
  "handshake": [
    "Purpose", "Request", "Scope", "Security", "dial", "from_files",
  ],
  "links": ["Links"],
  "listener": ["Listener"],
  "transfers": ["Lost"],
})
