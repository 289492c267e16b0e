"""torch_xla's functions and classes, implemented on this package's own. `spmd` exports them."""
