from typing import Any

import numpy.typing as npt

def ban_ngrams(
    scores: npt.NDArray[Any], tokens: npt.NDArray[Any], text: npt.NDArray[Any], size: int, form: str, /
) -> None: ...
