"""Other packages' names over this one: `spmd.compat.torch_xla`."""
