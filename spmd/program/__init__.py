"""From a traced function to one compiled, donated, sharded program that runs again and again.

Note [One call]
    What happens between `train_step(x, y)` and its result; a test follows a call and compares.

    find the program
        _step.py Step.__call__                          one thread at a time; inside another trace it is a plain call
        reuse/_signature.py signature                   tensors by shape, dtype, sharding; the rest by value
        reuse/_program_cache.py ProgramCache.of         the programs that were traced for this signature
        _program.py Program.reason_to_trace             per program: why it does not hold any more
        reuse/_columns.py Guards.reason                 what its trace read of Python, and its state, is as it was

    trace, if none holds
        _step.py Step._new                              again when a trace finds that it needs other settings (trace/_trace_settings.py)
        find/_discover.py reachable                     the modules, optimizers and tensors that the function can reach
        optim/_preparation.py prepare_state             optimizer state exists before it is traced
        trace/_capture.py capture                       one trace
        trace/_arguments.py bind                        each argument a tensor whose value the trace gives
        trace/_trace.py Trace.run                       jax calls it with tracers: every buffer holds one now
        reads/_swap.py swap                             code outside the libraries asks for its recorded form
        reads/_recorder.py Recording.run                the user's function runs, reads and writes noted
        reads/_recorder.py Recording.effects            what every call has to write in Python's objects
        reads/_journal.py Journal.undo                  Python's objects as they were
        trace/_output_tree.py OutputTree.take           what leaves the trace, down to tensors, numbers and what was there before
        trace/_results.py Results.outputs               which results are values of the program, arguments, state, constants
        trace/_gradients.py Gradients.collect           the gradients that the function left
        trace/_buffer_use.py TraceRecorder.put_back     every buffer as it was
        trace/_trace.py Trace.guards                    what the trace baked in
        _program.py Program._compile                    jax.jit with donation and shardings, compiled or found
        reuse/_program_cache.py ProgramCache.put        kept

    run
        _program.py Program.__call__                    state as it is today in, executable, new state out
        _program.py Program._result                     results, then the writes to Python's objects
        trace/_results.py made                          each result with the identity and the aliases it had
        trace/_output_tree.py rebuilt                   containers and objects, new ones in every call
"""
