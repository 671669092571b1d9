"""attmemo: attention memoization for transformers on CPU servers with memory to spare.

from attmemo import memoize
model = memoize(model, threshold=0.95)
print(model.attmemo.stats())
"""

from attmemo.db import Database
from attmemo.errors import (
    AdapterCheckError,
    AttmemoError,
    DatabaseError,
    DataError,
    StaleDatabaseError,
    UnsupportedModelError,
)
from attmemo.memoization import Memoization, memoize, unmemoize
from attmemo.similarity import similarity_score

__version__ = "0.1.0"

__all__ = [
    "AdapterCheckError",
    "AttmemoError",
    "DataError",
    "Database",
    "DatabaseError",
    "Memoization",
    "StaleDatabaseError",
    "UnsupportedModelError",
    "memoize",
    "similarity_score",
    "unmemoize",
]
