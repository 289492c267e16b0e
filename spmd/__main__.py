"""`python -m spmd`: the command `spmd`."""

from spmd.cli import main

main()
