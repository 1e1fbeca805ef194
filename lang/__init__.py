"""What a program can say: operations, sampling, choices, errors. Values and syntax, no I/O."""
