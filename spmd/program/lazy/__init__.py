"""Operations between two step boundaries, recorded and run as one program: `spmd.lazy()`."""
