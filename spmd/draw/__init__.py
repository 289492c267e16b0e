"""Drawings of layouts: `spmd.visualize` makes them."""
