"""Parts of the engine as machine code: built once per machine, kept on disk, used when ready."""
