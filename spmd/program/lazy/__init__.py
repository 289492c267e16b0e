"""`spmd.lazy()`: records the operations between two step boundaries and runs them as one program."""
