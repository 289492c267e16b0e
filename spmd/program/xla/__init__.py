"""XLA: rewrites jaxprs before lowering, compiles them or finds their executables in a cache, and reads compiled programs."""
