"""What of other packages is replaced: `_table` lists every target, why, for how long, and the parameters that it should have."""
