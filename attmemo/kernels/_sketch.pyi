import numpy as np
import numpy.typing as npt

def sketch(
    tokens: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32], /
) -> None: ...
def nearest(scores: npt.NDArray[np.float32], nearest: npt.NDArray[np.int64], /) -> None: ...
def look(
    tokens: npt.NDArray[np.int64], valid: npt.NDArray[np.uint8], former: npt.NDArray[np.uint8],
    seen: npt.NDArray[np.uint8], counts: npt.NDArray[np.int64], together: int, /,
) -> None: ...  # fmt: skip
