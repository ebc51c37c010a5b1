"""``config.benchmark``: one section per benchmark."""
