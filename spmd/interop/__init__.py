"""Between torch and JAX: arrays as tensors and tensors as arrays, modules as JAX functions, programs as files that need no torch."""
