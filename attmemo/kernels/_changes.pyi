import numpy as np
import numpy.typing as npt

def changes(
    tokens: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    record_tokens: npt.NDArray[np.int32],
    record_starts: npt.NDArray[np.int64],
    partner: npt.NDArray[np.int32],
    kinds: npt.NDArray[np.uint8],
    sequence: npt.NDArray[np.int64],
    slot: npt.NDArray[np.uint64],
    value: npt.NDArray[np.uint64],
    former: npt.NDArray[np.uint64],
    change: npt.NDArray[np.uint64],
    word: npt.NDArray[np.uint8],
    /,
) -> int: ...
