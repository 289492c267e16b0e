"""Interoperation of torch and JAX: tensors as arrays and back, modules as JAX functions, programs as files that need no torch."""
