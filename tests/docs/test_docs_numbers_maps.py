"""The numbers of docs/measured.md on attention maps: cells and sentences agree with the JSON files."""

from __future__ import annotations

from typing import Any

from docs_tools import agree, measured, numbers, page, says, set_in, shows, table_rows

from attmemo.perfmodel.tuner import JUDGED, changes_allowed, sequences_judged
from attmemo.profiler.evaluate import EvaluateOptions

TEXT, FOUND = page("measured.md"), measured("maps.json")
ROWS = [
    ("deberta", "tuned"), ("openssh", "fixed"), ("openssh", "tuned"), ("hdfs", "fixed"), ("hdfs", "tuned"),
    ("bgl", "fixed"), ("bgl", "tuned"),
]  # fmt: skip
"""Cases of maps.json, in the order of the table."""
LOG = 2000  # lines


def percents(one: dict[str, Any]) -> list[float]:
    """Calls served, and those that an exhaustive search would serve where that was looked at."""
    return [100 * share for share in (one["served"], one["exhaustive"]) if share is not None]


def answers(one: dict[str, Any]) -> list[float]:
    """What the last column prints."""
    quality = one["quality"]
    if quality["accuracy_exact"] is not None:
        return [100 * quality["changed"], quality["accuracy_exact"], quality["accuracy_memoized"]]
    return [100 * quality["changed"], quality["cosine_mean"], 1, quality["cosine_p1"]]


def test_every_case_of_maps_was_measured() -> None:
    rows = table_rows(TEXT, "| data, model | threshold |")
    assert set(ROWS) == {(name, kind) for name, case in FOUND.items() for kind in ("fixed", "tuned") if kind in case}
    for (_, threshold, served, speed, quality), (name, kind) in zip(rows, ROWS, strict=True):
        one = FOUND[name][kind]
        if kind == "fixed":
            assert shows(threshold, one["threshold"])
        else:
            assert threshold == "tuned, 1 %"
        agree(numbers(served), percents(one))
        agree(numbers(speed), [one["time"][key] for key in ("speedup", "speedup_low", "speedup_high")])
        agree(numbers(quality.replace("1st", "1")), answers(one))
        assert one["in_database"] == 0


def test_the_conditions_of_maps_are_those_of_the_runs() -> None:
    runs = [case[kind] for case in FOUND.values() for kind in ("fixed", "tuned") if kind in case]
    features = {tuple(one["conditions"]["features"]) for one in runs}
    assert features == {("avx2", "avx512f")}, "no matrix unit, no bfloat16"
    assert {one["conditions"]["batch_size"] for one in runs} == {32}
    assert {one["conditions"]["dtype"] for one in runs} == {"float32"}
    trained, tuned = set_in("reproduce.py", r"^TRAINED, TUNED = (\S+), (\S+)  #")
    says(TEXT, "the first # % of the lines train the embedder, the next # % are added then and tune, the last # % are",
         100 * trained, 100 * (tuned - trained), 100 * (1 - tuned))  # fmt: skip
    for name in ("openssh", "hdfs", "bgl"):
        found = FOUND[name]
        assert (found["trained"], found["stored"]) == (round(LOG * trained), round(LOG * tuned))
        assert found["tune"]["in_time"] == found["tune"]["total"] == round(LOG * (tuned - trained))
    (kept,) = set_in("reproduce.py", r"^WINDOWS = (\d+)  #")
    (until,) = set_in("reproduce.py", r'windows\(folder, 0\.0, (\S+)\)\)\.sample')
    says(TEXT, "Of windows, # are stored, drawn by chance from the first # % of the eight logs;", kept, 100 * until)
    begin, middle, end = set_in("reproduce.py", r"for a, b in \(\((\S+), (\S+)\), \(0\.85, (\S+)\)\)")
    assert begin == until
    text = "those of the next # % tune, those of the last # % are asked."
    says(TEXT, text, 100 * (middle - begin), 100 * (end - middle))
    assert FOUND["deberta"]["stored"] == kept
    says(TEXT, "The exhaustive search looks at # of the asked texts.", EvaluateOptions().exhaustive)
    lines = round(LOG * (tuned - trained))
    judged = int(JUDGED * lines)
    assert 0 < sequences_judged(lines, 0.01) < judged, "the bound grows, so more are judged than it takes"
    template = "Of # lines it judges on #, of which # may change within a budget of # % at # %; of # lines"
    few = round(LOG * 0.15)
    says(TEXT, f"{template} none may change.", lines, judged, changes_allowed(judged, 0.01), 1, 95, few)
    assert changes_allowed(few, 0.01) == 0
    assert {FOUND[name]["tune"]["judged"] for name in ("openssh", "hdfs", "bgl")} == {judged}


def test_what_hdfs_serves_was_measured() -> None:
    shares = [100 * FOUND[name][of]["served"] for name in ("hdfs", "openssh") for of in ("tuned", "tune")]
    text = "HDFS serves # % of the calls of asked lines, and # % of those that judged; OpenSSH # and # %."
    says(TEXT, text, *shares)
    growth = [FOUND[name]["tune"]["growth"] for name in ("hdfs", "openssh")]
    says(TEXT, "With all records # to # times as many lines are served", *growth)


def test_what_a_score_does_that_was_not_judged_was_measured() -> None:
    one = FOUND["bgl"]["fixed"]
    text = "at #, # % of the answers to BGL change, and nothing"
    says(TEXT, text, one["threshold"], 100 * one["quality"]["changed"])


def test_controls_of_maps_were_measured() -> None:
    controls = {one["name"]: one for one in FOUND["deberta"]["tuned"]["controls"]}
    shares = [100 * controls[name]["agreement"] for name in ("mean map", "random map", "memoized")]
    template = "the mean map of the length leaves # % of the answers unchanged, a random record's maps # %,"
    says(TEXT, f"{template} memoization # %.", *shares)


def test_what_memoization_costs_without_a_hit_was_measured() -> None:
    idle = [case["overhead"] for case in FOUND.values()]
    assert all(one["hit rate"] == 0 for one in idle)
    ends = [
        end(one[f"{way}, batch {size}"] for one in idle)
        for way in ("disabled", "no hits") for size in (1, 32) for end in (min, max)
    ]  # fmt: skip
    template = (
        "disabled # to # at batch # and # to # at batch #; enabled with a score of # asked, so that nothing hits, "
        "# to # at batch # and # to # at batch #."
    )
    says(TEXT, template, *ends[:2], 1, *ends[2:4], 32, 1, *ends[4:6], 1, *ends[6:], 32)


def test_the_most_that_maps_save_was_measured() -> None:
    known = {
        (one["family"], one["length"], one["batch"]): one for one in measured("bench-twelve-layers.json")["rows"]
    }  # fmt: skip
    names = {"DeBERTa-v2": "deberta-v2", "BERT, fused attention": "bert"}
    for model, size, speed, share in table_rows(TEXT, "| model | tokens × batch |"):
        length, count = map(int, size.split(" × "))
        one = known[names[model], length, count]
        agree([speed, share], [one["speedup"], 100 * one["overhead"]])
