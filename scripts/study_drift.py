"""How far answers are from the exact ones if reused rows follow the computed ones: `attmemo.kernels.rows`.

    python scripts/study_drift.py SHARED OUT.json [LOG…]

The first 300 lines of each log go through MiniLM one by one, in order of time, nothing stored at first, without a
guard, `threshold=0.4`. Embeddings are means of the last hidden states. Every reused embedding is compared with the
exact one, for several shares of the drift; nothing is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from bench_guard import Served, Unguarded
from measured_at import write_record
from workloads import lines_of

from attmemo.rows import serve as rows

SHARES: Final = (0.0, 1.0)
LOGS: Final = ("OpenSSH", "HDFS", "BGL", "Apache", "Mac")
LINES: Final = 300


def cosines(shared: Path, log: str, share: float) -> list[float]:
    """Of each line that a record serves, to the exact embedding."""
    served = Served.of(shared, "minilm", Unguarded, threshold=0.4)
    handle: Any = served.model.attmemo
    found = []
    for line in lines_of(shared / "data", log)[:LINES]:
        inputs = served.tokenizer(line, truncation=True, max_length=256, return_tensors="pt")
        rows.DRIFT = share  # type: ignore[misc]  # the study is about this number
        with torch.inference_mode(), handle.observe() as seen:
            own = served.model(**inputs)[0].mean(1)
            exact = served.exact(**inputs)[0].mean(1)
        if seen.rows[0] < seen.tokens[0]:
            found.append(float(torch.cosine_similarity(own, exact)))
        handle.flush()
    return found


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("logs", nargs="*", default=LOGS)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for log in options.logs:
        for share in SHARES:
            own = np.array(cosines(options.shared, log, share))
            result.setdefault(log, {})[str(share)] = {
                "served": len(own), "mean": float(own.mean()), "5th percentile": float(np.quantile(own, 0.05)),
                "below .98": float((own < 0.98).mean()),
            }  # fmt: skip
            print(log, share, result[log][str(share)], flush=True)
    write_record(options.out, result)


if __name__ == "__main__":
    main()
