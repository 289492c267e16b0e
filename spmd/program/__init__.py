"""A traced function as one compiled, donated, sharded program that every call runs.

Note [One call]
    The functions that run between `train_step(x, y)` and its result, in order. A test profiles a call and compares.

    find the program
        _step.py Step.__call__                          takes the trace lock; inside another trace it is a plain call
        reuse/_signature.py signature                   tensors by shape, dtype and sharding; other arguments by value
        reuse/_program_cache.py ProgramCache.of         the programs that were traced for this signature
        _program.py Program.reason_to_trace             for each program: why it is not valid any more
        reuse/_columns.py Guards.reason                 the first guard that fails: Python values and state that the trace read

    trace, if none holds
        _step.py Step._new                              repeated when a trace needs other settings (trace/_trace_settings.py)
        find/_discover.py reachable                     finds the modules, optimizers and tensors that the function can reach
        optim/_preparation.py prepare_state             creates optimizer state, so that the trace finds it
        trace/_capture.py capture                       one trace
        trace/_arguments.py bind                        gives every device argument a storage of its own
        trace/_trace.py Trace.run                       is called by jax; puts a tracer into every buffer
        reads/_swap.py swap                             replaces the user's code by instrumented code
        reads/_recorder.py Recording.run                runs the user's function; records its reads and writes
        reads/_recorder.py Recording.effects            the writes to Python objects that every call repeats
        reads/_journal.py Journal.undo                  restores the Python objects
        trace/_output_tree.py OutputTree.take           takes results apart, down to tensors, numbers and objects from before the trace
        trace/_results.py Results.outputs               classifies each result: program output, argument, state or constant
        trace/_gradients.py Gradients.collect           the gradients that the function left
        trace/_buffer_use.py TraceRecorder.put_back     restores every buffer
        trace/_trace.py Trace.guards                    guards on everything that the trace turned into constants
        _program.py Program._compile                    jax.jit with donation and shardings; compiles, or finds a cached executable
        reuse/_program_cache.py ProgramCache.put        caches the program

    run
        _program.py Program.__call__                    passes the current state to the executable; stores the new state
        _program.py Program._result                     the results; then the writes to Python objects
        trace/_results.py made                          each result with its identity and aliases as in the trace
        trace/_output_tree.py rebuilt                   containers and objects, created anew by every call
"""
