"""What every other room stands on: errors, dtypes and buffers, counters, and the private names of jax."""
