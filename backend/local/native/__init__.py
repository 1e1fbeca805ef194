"""The C++ kernels for a CPU: built once per machine, tried, and used where they are right."""
