"""Put the tables of pages between their marks, from the JSON files in docs/ and from the library.

python scripts/result_pages.py       # after a measurement wrote a new JSON

Scripts that measure one page alone write their page themselves: scripts/marked.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import bench_answers
from marked import replace_measured
from results import filling, generation, guard, records, speed
from results.files import DOCS, measured

Table = Callable[[], list[str]]
PAGES: Final[dict[str, dict[str, Table]]] = {
    "guard-measured.md": {
        "streams": guard.streams, "logs": guard.each_log, "ablations": guard.ablations, "samples": guard.samples,
        "predictors": guard.predictors, "classes": partial(guard.curve, "classes", "margin"),
        "vectors": partial(guard.curve, "vectors", "cosine"), "switches": guard.switches, "alarms": guard.alarms,
    },
    "filling-measured.md": {
        "cold": filling.cold, "costs": filling.costs, "soon": filling.soon, "admitted": filling.admitted,
        "bounded": filling.bounded,
    },
    "answers-measured.md": {
        "orders": lambda: bench_answers.table_of_orders(measured("answers.json")),
        "forms": lambda: bench_answers.table_of_forms(measured("answers.json")),
    },
    "measured.md": {"reuse": speed.reuse}, "privacy.md": {"sizes": records.sizes},
    "service-measured.md": {
        "gains": speed.found_of_services,
        "float32": partial(speed.service, "service.json"), "AMX": partial(speed.service, "service-bfloat16.json"),
        "AVX-512": partial(speed.service, "service-avx512.json"),
    },
    "streams-measured.md": {
        "AVX-512": partial(speed.streams, "streams-avx512.json"), "AMX": partial(speed.streams, "streams.json"),
        "float32": partial(speed.streams, "streams-float32.json"), "prepared": speed.prepared, "maps": speed.maps,
        "most": speed.most, "slots": filling.in_a_gib,
    },
    "rows-measured.md": {
        "AMX": partial(speed.rows, "bfloat16"), "AVX-512": partial(speed.rows, "bfloat16", "without a matrix unit"),
        "float32": partial(speed.rows, "float32"), "drift": speed.drift, "chosen": speed.chosen,
    },
    "scale-measured.md": {"cores": speed.cores, "GPU": speed.against_a_gpu},
    "fastseq.md": {"glance": generation.glance},
    "fastseq-measured.md": {
        "settings": generation.settings, "steps": generation.steps, "GPU": generation.on_a_gpu,
        "n-grams": partial(generation.ngrams, "ngram.json"),
        "n-grams on a GPU": partial(generation.ngrams, "ngram-gpu.json"),
    },
    "attention-op.md": {
        "float32": partial(generation.operator, "float32"), "bfloat16": partial(generation.operator, "bfloat16"),
        "means": generation.operator_means, "GPU": generation.operator_on_a_gpu, "exactness": generation.exactness,
    },
}  # fmt: skip
"""The tables of each page by the names of their marks."""


def main() -> None:
    for page, tables in PAGES.items():
        for name, made in tables.items():
            replace_measured(DOCS / page, "\n".join(made()), name)


if __name__ == "__main__":
    main()
