"""Other libraries as hosts. Each frontend imports its library only when it is imported itself."""
