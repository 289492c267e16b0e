"""What exists for torch_xla's names: its functions and classes over this package's own. Their public home is `spmd`."""
