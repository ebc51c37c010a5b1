"""Models and the protocol by which training and inference use them."""
