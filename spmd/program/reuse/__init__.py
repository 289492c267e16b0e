"""Which program answers a call: the signature of its arguments, and guards on what the trace baked in."""
