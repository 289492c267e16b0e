"""Pictures of shardings, for `spmd.visualize`."""
