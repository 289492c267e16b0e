"""The backend "spmd" of torch.compile: graphs that Dynamo captures, as programs of jax.

    model = GPT2().to("jax")
    fast = torch.compile(model, backend="spmd")         # found by its entry point
    step = torch.compile(train_step, backend="spmd")    # with backward and optimizer: one program, see Note [Whole steps]
    spmd.dynamo.graphs()                                # what was compiled, and what was not and why

Note [Graphs as Dynamo has them]
A graph is run under our own trace as Dynamo has it, in torch's own calls, and torch's autograd writes its backward pass in that trace.
AOTAutograd would hand us operators of ATen instead: `linear` and attention taken apart, 4-D products as views and `bmm`, which merges
dims that lie over different axes. What it does besides is done here: writes to inputs, results that are views, random numbers.
"""

from spmd.dynamo._compile_graph import compile_graph as compile_graph
from spmd.dynamo._compile_graph import graphs as graphs
from spmd.dynamo._graph_program import GraphProgram as GraphProgram
from spmd.dynamo._whole_step import step_of as step_of

__all__ = ["GraphProgram", "compile_graph", "graphs", "step_of"]
