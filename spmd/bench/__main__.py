"""`python -m spmd.bench`: the benchmark suite, as run by `make bench`."""

import tyro

from spmd.bench._suite import SuiteArgs, suite

raise SystemExit(suite(tyro.cli(SuiteArgs)))
