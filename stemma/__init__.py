"""Stemma: a language for structured LLM programs, and a local engine that computes every shared prefix once."""
