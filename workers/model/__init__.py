"""Model families, their weights, and the files they come from."""
