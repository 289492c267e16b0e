"""What a traced function reads and writes of Python: recorded as it happens, guarded, undone, and repeated by each call.

Every program is guarded by what its trace *read*, not by what its code names. See Note [Reads] in `_recorder`.
"""

from spmd.program.reads._guard import ReadsGuard
from spmd.program.reads._journal import Effect
from spmd.program.reads._library import is_library
from spmd.program.reads._places import ABSENT, PLAIN, NumberPlace
from spmd.program.reads._recorder import Recording, recorded
from spmd.program.reads._replaced import Held, touched_by, who_guard
from spmd.program.reads._swap import code_of
from spmd.program.reads._varying import Numbers, Varying
from spmd.program.reads._varying_index import ViewNeeded

__all__ = [
    "ABSENT",
    "PLAIN",
    "Effect",
    "Held",
    "NumberPlace",
    "Numbers",
    "ReadsGuard",
    "Recording",
    "Varying",
    "ViewNeeded",
    "code_of",
    "is_library",
    "recorded",
    "touched_by",
    "who_guard",
]
