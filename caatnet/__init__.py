"""Models, data, training, inference, serving and studies."""
