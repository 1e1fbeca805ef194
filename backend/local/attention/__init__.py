"""Attention of one step, as a plan of spans and its executors."""
