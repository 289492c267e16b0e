"""Recording of the Python values that a traced function reads and writes. Reads become guards; writes are undone and repeated by each call.

Every program is guarded by the values that its trace *read*, not by the names in its code.

    with recorded() as recording:
        result = recording.run(fn, *args)
        effects = recording.effects()                    # the writes, which every call repeats
    guard_places(guards, recording.settled(expected))    # the reads, which are compared before every call

Note [Reads]
    A program is valid as long as the Python values that its trace read are unchanged. In this function, the trace reads the globals
    `model` and `config`, the item `config["lr"]`, and all that the module's call reads:

        def step(x):
            return model(x) * config["lr"]      # hooks: load_global, call, load_global, load_item, operate

    The steps, and the files that do them:

    1. Instrumentation. While a function is traced, all code outside the libraries runs as instrumented bytecode (`_swap`,
       `_instrument`). It calls a hook (`_hooks`) with the operands before each instruction that loads a global, a closure variable, an
       attribute or an item, or that iterates, compares, tests, calls or writes. The hook calls a method of `Recording`, in most cases the
       one with its name.
    2. Reads. A read is recorded as a `Place`: the holder (a dict, a list, a cell, a slot, an array) and what the trace saw in it
       (`_places`, `_places_read`). Properties, `__getitem__`, module hooks and schedulers need no rule of their own: they are Python code,
       so their reads are recorded when they run.
    3. Library calls. Code of a library (`_library`) is not instrumented. Everything that is passed to it counts as read, and its
       containers as possibly written, including all mutable objects inside (`read_deep`). `_calls` is more precise about known C functions.
    4. Writes. The journal (`_journal`) notes the old value before each write (`_places_written`). The writes are undone when the trace
       ends, and each call of the program repeats them (`Effect`).
    5. Guards. Each place becomes a guard (`_guard`): it is compared before each call, without running user code. Objects that the trace
       created are not guarded (`_heap`). An int or float that has changed is an input of the next program instead (`_varying`).
    6. Refusals. A value that a later call cannot read again is an error: an iterator from before the trace, a random generator, a clock.
"""

from spmd.program.reads._change_texts import change_text
from spmd.program.reads._guard import guard_places
from spmd.program.reads._heap import made_in_trace
from spmd.program.reads._hooks import python_writes
from spmd.program.reads._journal import Effect, Writes, is_same_content
from spmd.program.reads._late_writes import LateWritesNeeded
from spmd.program.reads._library import is_library, is_recorded
from spmd.program.reads._memos import PutInCache
from spmd.program.reads._module_reads import RunModule
from spmd.program.reads._noted_sizes import is_noted
from spmd.program.reads._number_place import ABSENT, INPUT, LENGTH, NumberPlace, ObjectPlace, PartPlace, with_inputs
from spmd.program.reads._numpy_numbers import NUMBER_TYPES
from spmd.program.reads._parts import is_data, objects_in
from spmd.program.reads._pending import Pending
from spmd.program.reads._places import PLAIN, Place, content_of, items_of, shown, shown_key
from spmd.program.reads._process_only import ONLY_HERE
from spmd.program.reads._questions import COLLECTING, uncollected
from spmd.program.reads._recorder import Recording, recorded
from spmd.program.reads._replaced import ReplacedState, Replacements, changes, touched_by
from spmd.program.reads._special_names import SPECIAL
from spmd.program.reads._swap import code_of, recorded_together
from spmd.program.reads._varying import Numbers, NumbersNeeded, Varying
from spmd.program.reads._varying_index import ViewNeeded

__all__ = [
    "ABSENT",
    "COLLECTING",
    "INPUT",
    "LENGTH",
    "NUMBER_TYPES",
    "ONLY_HERE",
    "PLAIN",
    "SPECIAL",
    "Effect",
    "LateWritesNeeded",
    "ReplacedState",
    "Replacements",
    "NumberPlace",
    "ObjectPlace",
    "PartPlace",
    "Numbers",
    "NumbersNeeded",
    "Pending",
    "PutInCache",
    "Place",
    "Recording",
    "RunModule",
    "Varying",
    "Writes",
    "ViewNeeded",
    "changes",
    "code_of",
    "content_of",
    "change_text",
    "guard_places",
    "is_data",
    "is_library",
    "is_noted",
    "is_recorded",
    "is_same_content",
    "items_of",
    "made_in_trace",
    "objects_in",
    "python_writes",
    "recorded",
    "recorded_together",
    "shown",
    "shown_key",
    "touched_by",
    "uncollected",
    "with_inputs",
]
