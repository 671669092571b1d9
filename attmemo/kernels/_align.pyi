import numpy as np
import numpy.typing as npt

def align(
    tokens: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    candidates: npt.NDArray[np.int64],
    record_tokens: npt.NDArray[np.int32],
    record_starts: npt.NDArray[np.int64],
    kinds: npt.NDArray[np.uint8],
    record: npt.NDArray[np.int64],
    source: npt.NDArray[np.int32],
    computed: npt.NDArray[np.int64],
    near: int,
    near_numbers: int,
    most_moved: int,
    edges: bool,
    ends: bool,
    longest: int,
    /,
) -> None: ...
def sketch(
    tokens: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32], /
) -> None: ...
def nearest(scores: npt.NDArray[np.float32], nearest: npt.NDArray[np.int64], /) -> None: ...
