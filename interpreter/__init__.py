"""Runs programs: lowers the operations of a state to the calls of a backend."""
