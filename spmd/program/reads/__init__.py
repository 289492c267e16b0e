"""What a traced function reads and writes of Python: recorded as it happens, guarded, undone, and repeated by each call.

Every program is guarded by what its trace *read*, not by what its code names. See Note [Reads] in `_recorder`.
"""

from spmd.program.reads._guard import changed_numbers, guard_places
from spmd.program.reads._heap import made_in_trace
from spmd.program.reads._hooks import python_writes
from spmd.program.reads._journal import Effect, Writes, is_same_content
from spmd.program.reads._library import is_library
from spmd.program.reads._module_reads import RunModule
from spmd.program.reads._number_place import ABSENT, INPUT, NumberPlace, with_inputs
from spmd.program.reads._places import PLAIN, Place, shown
from spmd.program.reads._recorder import Recording, recorded
from spmd.program.reads._replaced import ReplacedState, guard_who, touched_by
from spmd.program.reads._swap import code_of, recorded_together
from spmd.program.reads._varying import Numbers, NumbersNeeded, Varying, is_noted
from spmd.program.reads._varying_index import ViewNeeded

__all__ = [
    "ABSENT",
    "INPUT",
    "PLAIN",
    "Effect",
    "ReplacedState",
    "NumberPlace",
    "Numbers",
    "NumbersNeeded",
    "Place",
    "Recording",
    "RunModule",
    "Varying",
    "Writes",
    "ViewNeeded",
    "changed_numbers",
    "code_of",
    "guard_places",
    "guard_who",
    "is_library",
    "is_noted",
    "is_same_content",
    "made_in_trace",
    "python_writes",
    "recorded",
    "recorded_together",
    "shown",
    "touched_by",
    "with_inputs",
]
