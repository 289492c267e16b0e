"""The backend by its name, whatever version of this package the environment had installed; nothing that Dynamo kept of another test."""

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

from spmd.dynamo import compile_graph

if "spmd" not in torch._dynamo.list_backends(exclude_tags=None):
    torch._dynamo.register_backend(compile_graph, "spmd")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
