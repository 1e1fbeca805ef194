"""What a program can say: operations, sampling settings, choices, errors. Values and syntax, no I/O."""
