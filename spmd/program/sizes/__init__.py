"""Programs for sizes that vary: what a dim's size has part in, and how a larger program computes the same.

Note [One size]
    How a size gets through a call of `spmd.compile(dynamic=...)`, beside the hops of Note [One call]; a test follows a call and compares.

    find the program
        _sized_step.py SizedStep._found              the arguments are padded first; then as for any step
        sizes/_dims.py AskedDims.sizes               the size that each name has in this call (dynamic=True: `_learned_dims`)
        sizes/_dims.py Dim.bucket                    the size of the program that will run it
        sizes/_sized_arguments.py padded             an argument of that size
        _step.py Step._found                         a program for the padded arguments

    trace, if none holds
        sizes/_family_search.py Families.search      for all sizes; else for a part of them; else for those of one remainder
        sizes/_trace_points.py points_within         at which sizes the function is traced
        sizes/_sized_arguments.py stand_in           an argument of such a size
        sizes/_size_reads.py sizes_read              what Python reads of sizes, and asks of them, is noted
        trace/_capture.py capture                    one trace at each of these sizes
        sizes/_family.py Family.__init__             the traces, as one function of the sizes
        sizes/_window_extents.py learn_extents       an extent behind strides and windows: by their rule. See Note [Windows]
        sizes/_family.py questions                   what Python asked must have the same answers for other sizes
        sizes/_formulas.py Points.integer            any other integer: by its values in the traces. See Note [Points]
        sizes/_family.py Family.padded               the program for a bucket
        sizes/_evaluate.py Evaluation.run            equation by equation: a shape is the bucket's
        sizes/_evaluate.py Evaluation.operation      by the rule of its primitive (`_rules_elements` and its like)
        sizes/_padded.py Room.mask                   which elements are no padding. See Note [Padding]
        sizes/_sized_program.py SizedProgram.__init__    what leaves it, and which dims of that are cut
        _program.py Program._compile                 as any program

    run
        sizes/_sized_program.py SizedProgram.__call__    the sizes of the call are an input
        _program.py Program.__call__                 state in, executable, new state out
        sizes/_sized_program.py SizedProgram._result    results cut to the sizes of the call
        sizes/_family.py Family.leaves               Python numbers that follow from sizes

    `spmd.export(dynamic=...)` has `_symbolic` in place of `Family.padded`: nothing is padded, sizes are jax's symbols. Graphs of
    Dynamo are traced at points too (`spmd/dynamo/_sized_traces.py`); their sizes are Dynamo's.
"""
