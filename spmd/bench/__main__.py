"""`python -m spmd.bench`: the suite that `make bench` runs."""

import tyro

from spmd.bench._suite import SuiteArgs, suite

raise SystemExit(suite(tyro.cli(SuiteArgs)))
