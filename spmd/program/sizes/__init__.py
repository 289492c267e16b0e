"""Programs for varying sizes: how a program depends on a dim's size, and how a larger program computes the same results.

Note [One size]
    How a call of `spmd.compile(dynamic=...)` gets a program for its sizes, in addition to the steps of Note [One call]. A test follows a
    call and compares.

    find the program
        _sized_step.py SizedStep._found              pad the arguments, then continue as for any step
        sizes/_dims.py AskedDims.sizes               size of each named dim in this call (dynamic=True: `_learned_dims`)
        sizes/_dims.py Dim.bucket                    size of the program that runs the call
        sizes/_sized_arguments.py padded             an argument padded to that size
        _step.py Step._found                         a program for the padded arguments

    trace, if none holds
        sizes/_family_search.py Families.search      traces for all sizes; else for a range; else for one remainder
        sizes/_trace_points.py points_within         choose the sizes at which the function is traced
        sizes/_sized_arguments.py stand_in           a placeholder argument of such a size
        sizes/_size_reads.py sizes_read              record the sizes that Python reads and its conditions on them
        trace/_capture.py capture                    one trace for each of these sizes
        sizes/_family.py Family.__init__             combine the traces into one function of the sizes
        sizes/_window_extents.py learn_extents       derive extents behind strides and windows. See Note [Windows]
        sizes/_family.py questions                   Python's conditions must have the same results for other sizes
        sizes/_formulas.py Points.integer            infer other integers from their values in the traces. See Note [Points]
        sizes/_family.py Family.padded               the program for a bucket
        sizes/_evaluate.py Evaluation.run            evaluate each equation with the bucket's shapes
        sizes/_evaluate.py Evaluation.operation      apply the padding rule of its primitive (`_rules_*`)
        sizes/_padded.py Room.mask                   mask of the real elements. See Note [Padding]
        sizes/_sized_program.py SizedProgram.__init__    the outputs, and which of their dims are cut
        _program.py Program._compile                 compile it like any program

    run
        sizes/_sized_program.py SizedProgram.__call__    pass the sizes of the call as an input
        _program.py Program.__call__                 state in, executable, new state out
        sizes/_sized_program.py SizedProgram._result    cut the results to the sizes of the call
        sizes/_family.py Family.leaves               Python numbers computed from sizes

    `spmd.export(dynamic=...)` uses `_symbolic` instead of `Family.padded`: nothing is padded, and sizes are symbolic dims of jax. Dynamo
    graphs are traced at several sizes too (`spmd/dynamo/_sized_traces.py`); their sizes come from Dynamo.
"""
