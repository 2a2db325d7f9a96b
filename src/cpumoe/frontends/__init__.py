"""Other libraries as hosts of cpumoe; each frontend imports its library only when imported itself."""
