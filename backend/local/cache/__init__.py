"""The prefix cache: a radix tree of tokens over the slots of the KV pool."""
