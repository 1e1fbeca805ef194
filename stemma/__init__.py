"""Stemma: a language for structured LLM programs, and an engine that computes every prefix once."""
