"""The lowest floor of `spmd`: errors, settings, dtypes, counters, progress, and the private names of torch and jax."""
