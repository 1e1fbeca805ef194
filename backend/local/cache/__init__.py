"""The KV pool and the radix tree that owns its pages."""
