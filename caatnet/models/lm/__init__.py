"""Components shared by language models with partially synchronised layers."""
