"""Training and decoding, compared with other projects on one machine."""
