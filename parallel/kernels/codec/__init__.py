"""Block codecs for means of deltas: encoding, decoding and outer steps."""
