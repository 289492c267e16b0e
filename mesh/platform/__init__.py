"""Fixes for the CPU platform (collectives between processes, allocator, threads), and jax's private names."""
