"""The decoder and everything that brings its weights: configuration, formats, the default model."""
