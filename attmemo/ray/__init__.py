"""attmemo on many nodes, with Ray: `Encoder` for tables, `application` for services, `ensure_local` for databases.

Only `application` needs Ray itself. `Encoder` is a class that `ray.data.Dataset.map_batches` calls, and works without.
"""

from attmemo.ray.encoder import Encoder
from attmemo.ray.replica import ensure_local
from attmemo.ray.service import application

__all__ = ["Encoder", "application", "ensure_local"]
