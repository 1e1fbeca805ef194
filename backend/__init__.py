"""What `gen` and `select` lower to: the abstract Backend and Branch, and the backends."""
