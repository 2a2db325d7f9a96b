"""Other libraries as hosts of cpumoe. Each frontend imports its library only when it is imported itself."""
