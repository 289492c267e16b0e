"""`python -m spmd.train`: the same as `spmd train`, for launchers that start modules."""

from spmd.train._train_command import main

if __name__ == "__main__":
    raise SystemExit(main())
