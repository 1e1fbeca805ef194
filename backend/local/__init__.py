"""The local engine: one model, one radix tree over its KV cache, one loop."""
