"""Control flow, micro-batches and recomputation: parts of a trace that run repeatedly or conditionally."""
