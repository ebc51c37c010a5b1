"""Cache lines that a GPU reads when it gathers rows of features."""
