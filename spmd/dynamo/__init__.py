"""The backend "spmd" of torch.compile: compiles graphs that Dynamo captures to programs of jax.

    model = GPT2().to("jax")
    fast = torch.compile(model, backend="spmd")         # found through its entry point
    step = torch.compile(train_step, backend="spmd")    # with backward and optimizer: one program, see Note [Whole steps]
    spmd.dynamo.graphs()                                # what was compiled, and why something was not

Note [Graphs as Dynamo has them]
Our own trace runs a graph as Dynamo captured it, in torch-level calls, and torch's autograd writes the backward pass in that trace.
AOTAutograd would give us ATen operators instead: `linear` and attention decomposed, and 4-D products as views and `bmm`, which merge dims
that are split over different axes. The rest of AOTAutograd's work is done here: writes to inputs, results that are views, random numbers.
"""

from spmd.dynamo._compile_graph import compile_graph as compile_graph
from spmd.dynamo._compile_graph import graphs as graphs
from spmd.dynamo._graph_program import GraphProgram as GraphProgram
from spmd.dynamo._whole_step import step_of as step_of

__all__ = ["GraphProgram", "compile_graph", "graphs", "step_of"]
