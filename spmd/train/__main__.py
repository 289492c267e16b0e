"""`python -m spmd.train`: what `spmd train` is, for launchers that start modules."""

from spmd.train._train_command import main

if __name__ == "__main__":
    raise SystemExit(main())
