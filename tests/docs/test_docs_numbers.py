"""Numbers of the pages of the service, the demo, streams and rows are those of the JSON files beside the pages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from docs_tools import RowsCase, agree, measured, numbers, page, says, set_in, spread, table_rows

from attmemo.profiler.race import APPROXIMATE, CACHE, MAPS, ONNX, OPENVINO, PACKED, ROWS, STOCK

FLOAT32, AMX, AVX512 = "service.json", "service-bfloat16.json", "service-avx512.json"
TABLES = {  # the text before each table of docs/service.md
    FLOAT32: "float32, MiniLM-L6, lines of OpenSSH",
    AMX: "In bfloat16, two cores with AMX",
    AVX512: "In bfloat16, two cores with AVX-512",
}
SERVERS = {
    "rows": "this service, guard certified",
    "none": "this service, `--reuse none`: exact",
    "plain": "FastAPI around sentence-transformers",
}
REPEATED = ("lines-OpenSSH", "lines-HDFS", "lines-HDFS-threshold52", "lines-Apache")
LINES = (*REPEATED, "lines-BGL")
EXACT, PEER = "the best exact path", "the best peer"
WITHOUT = "without a matrix unit"
SHAPES = ("bert-1x128", "bert-8x128", "bert-32x128", "bert-8x512")
STREAMS_TABLES = {  # the text before each table of docs/measured.md
    "streams.json": "With AMX, in bfloat16", "streams-float32.json": "The same in float32",
}  # fmt: skip
ROWS_TABLES = {  # of docs/rows.md: how a row begins, its case
    "lines of OpenSSH, MiniLM": "lines-OpenSSH", "lines of HDFS": "lines-HDFS",
    "lines of HDFS, `threshold=.52`": "lines-HDFS-threshold52", "lines of BGL": "lines-BGL",
    "lines of Apache": "lines-Apache", "questions of banking77, MiniLM": "text-banking77",
    "reviews of IMDB": "text-imdb", "windows of 4 log lines, six-layer DeBERTa-v2": "deberta-windows",
    "BERT-base shape, 1 × 128": "bert-1x128", "BERT-base shape, 8 × 128": "bert-8x128",
    "BERT-base shape, 32 × 128": "bert-32x128", "BERT-base shape, 8 × 512": "bert-8x512",
    "DeBERTa-v3-base shape, 8 × 512": "deberta-base-8x512",
}  # fmt: skip
MEASURED_TABLE = {  # of docs/measured.md
    "lines of HDFS, MiniLM": "lines-HDFS", "lines of OpenSSH, MiniLM": "lines-OpenSSH",
    "lines of Apache, MiniLM": "lines-Apache", "windows of log lines, DeBERTa-v2 with six layers": "deberta-windows",
    "8 × 512 tokens, DeBERTa-v3-base shape": "deberta-base-8x512", "8 × 128 tokens, BERT-base shape": "bert-8x128",
    "8 × 512 tokens, BERT-base shape": "bert-8x512", "1 × 128 tokens, BERT-base shape": "bert-1x128",
    "reviews of IMDB, MiniLM": "text-imdb",
}  # fmt: skip


def rate(found: Any, way: str, clients: int = 64) -> float:
    """Lines a second of a server: of 64 clients with single lines, or of two with batches of 32."""
    part = found[way]["batches_of_32"] if clients == 2 else found[way]["single"][0]
    assert part["clients"] == clients
    return float(part["lines_per_second"])


def gain(found: Any, way: str, clients: int = 64) -> float:
    """How many times the lines of another server the one with records gives."""
    return rate(found, "rows", clients) / rate(found, way, clients)


def library(found: Any, *ways: str) -> list[float]:
    """Lines a second of the library called directly."""
    return [found["direct"][way]["lines_per_second"] for way in ways]


def pressed(found: Any) -> tuple[int, int]:
    """Requests of an overload that were refused, and those that were answered; none timed out."""
    parts = found["overload"]["pressed"]
    assert all(part["timeouts"] == 0 for part in parts)
    refused = sum(part["not_2xx"] for part in parts)
    return refused, sum(part["requests"] for part in parts) - refused


def around(found: Any) -> list[float]:
    """Lines a second after an overload, and before it."""
    return [found["overload"][when]["lines_per_second"] for when in ("after_two_seconds", "saturation")]


def at_half(found: Any) -> list[float]:
    """Lines a second at half of saturation, median, 99th percentile, and that over the median."""
    half = found["rates"]["half"]
    return [half["lines_per_second"], half["p50_ms"], half["p99_ms"], half["p99_ms"] / half["p50_ms"]]


@pytest.mark.parametrize("file", TABLES)
def test_each_cell_of_the_services_tables_was_measured(file: str) -> None:
    found, rows = measured(file), table_rows(page("service.md"), TABLES[file])
    assert found["rows"]["guard"]["state"] == "certified"
    for (way, label), (first, *cells) in zip(SERVERS.items(), rows, strict=True):
        assert first.startswith(label)
        agree(numbers(first), [found[way]["share_computed"]] if way == "rows" else [])
        values = [[one["lines_per_second"], one["p50_ms"], one["p99_ms"]] for one in found[way]["single"]]
        assert [one["clients"] for one in found[way]["single"]] == [64, 8, 1]
        for cell, own in zip(cells, values if file == FLOAT32 else [*values, [rate(found, way, 2)]], strict=True):
            agree(numbers(cell), own)


def test_the_services_sentences_in_float32_were_measured() -> None:
    text, found = page("service.md"), measured(FLOAT32)
    exact, reused = library(found, "none", "rows")
    batches = [rate(found, way, 2) for way in SERVERS]
    says(text, "Batches of 32 lines a request, two clients: #, # and # lines a second.", *batches)
    template = "packed blocks #, rows (# computed) # lines a second. So at 64 clients"
    says(text, template, exact, found["direct"]["rows"]["share_computed"], reused)
    template = "gave # times what the plain server gives and # times what the exact service gives; with one client"
    says(text, template, gain(found, "plain"), gain(found, "none"))
    waits = [found[way]["single"][-1]["p50_ms"] for way in SERVERS]
    assert waits[0] < min(waits[1:])  # "with one client it answered sooner than both"
    shares = [100 * rate(found, "rows", clients) / reused for clients in (64, 2)]
    says(text, "gives # % of what the library gives with batches of 32, with batches of 32 lines # %", *shares)


def test_the_services_bounds_in_float32_were_measured() -> None:
    text, found = page("service.md"), measured(FLOAT32)
    over = found["overload"]
    says(text, "chance, # lines a second | median # ms, 99th percentile # ms: # times the median |", *at_half(found))
    clients = over["pressed"][0]["clients"], over["saturation"]["clients"]
    template = "# clients for a minute, where # saturate | # times 429, # answers, no time-out; the # answers that"
    says(text, template, *clients, *pressed(found), over["answers_checked"])
    says(text, "near the exact ones (cosine # and more) |", over["lowest_cosine_to_exact"])
    says(text, "two seconds afterwards, 64 clients | # lines a second; # before |", *around(found))
    says(text, "after each 20 seconds of pressure | #, #, #, # MB |", *over["resident_mb"])


def test_the_services_sentences_with_amx_were_measured() -> None:
    text, found = page("service.md"), measured(AMX)
    stock, exact, reused = library(found, "stock", "none", "rows")
    template = "stock #, packed blocks #, rows (# computed) # lines a second."
    says(text, template, stock, exact, found["direct"]["rows"]["share_computed"], reused)
    shares = [100 * rate(found, "rows", clients) / reused for clients in (2, 64)]
    says(text, "with 32 lines a request the service gives # % of that, and with single lines # %", *shares)
    template = "# times what the plain server gives at 64 clients, and # times what the exact service gives (# with"
    says(text, template, gain(found, "plain"), gain(found, "none"), gain(found, "none", 2))


def test_the_services_bounds_with_amx_were_measured() -> None:
    text, found = page("service.md"), measured(AMX)
    template = "(# lines a second) the median was # ms and the 99th percentile # ms, # times as much"
    says(text, template, *at_half(found))
    clients = found["overload"]["pressed"][0]["clients"]
    says(text, "Of # clients for a minute # requests got 429, # an answer, none a time-out", clients, *pressed(found))
    says(text, "of an answer to the exact one was #.", found["overload"]["lowest_cosine_to_exact"])
    says(text, "Two seconds afterwards 64 clients got # lines a second (# before)", *around(found))
    says(text, "Memory: # MB before, #, # and # MB under pressure. In bfloat16", *found["overload"]["resident_mb"])


def test_the_services_sentences_with_avx512_were_measured() -> None:
    text, found = page("service.md"), measured(AVX512)
    says(text, "stock #, packed blocks #, rows # lines a second. With", *library(found, "stock", "none", "rows"))
    template = "the service gives # times what the plain server gives and # times what the exact service gives."
    says(text, template, gain(found, "plain"), gain(found, "none"))
    rounds = found["turns"]["rounds"]
    single, many = (sorted(one[way] / one["library"] for one in rounds) for way in ("single", "batches_of_32"))
    template = "gives #, #, #, # and # of what the library gives, with 32 lines a request # to #. The median"
    says(text, template, *single, many[0], many[-1])
    says(text, "The median is # and #.", single[2], many[2])


def test_the_services_bounds_with_avx512_were_measured() -> None:
    text, found = page("service.md"), measured(AVX512)
    halves, over = [one["half"] for one in found["rates"]["rounds"]], found["overload"]
    times = sorted(half["p99_ms"] / half["p50_ms"] for half in halves)
    medians = sorted(half["p50_ms"] for half in halves)
    says(text, "99th percentile #, #, #, # and # times the median of # to # ms.", *times, medians[0], medians[-1])
    says(text, "Overload: # times 429, # answers, no time-out", *pressed(found))
    template = "the # answers that were compared to the exact ones is #. Memory: # MB before, #, # and # MB"
    says(text, template, over["answers_checked"], over["lowest_cosine_to_exact"], *over["resident_mb"])
    says(text, "Two seconds afterwards # lines a second (# before)", *around(found))
    offered = over["offered_over_saturation"]
    says(text, "# clients asked # times as much as saturation", over["pressed"][0]["clients"], min(offered))
    assert max(offered) - min(offered) < 0.1


@pytest.mark.parametrize(("label", "file"), [("AMX, bfloat16", "demo.json"), ("AVX2, float32", "demo-float32.json")])
def test_the_demos_on_lines_of_login_were_measured(label: str, file: str) -> None:
    found = measured(file)
    rows = table_rows(page("first-steps.md"), "Measured on lines of login")
    (row,) = [row for row in rows if row[0].startswith(label) and file in row[0]]
    every, late = found["parts"]["all"], found["parts"]["last third"]
    agree(numbers(row[1]), [every["texts"], found["stream_seconds"]])
    values = [every["speed"][PACKED], every["speed"][ROWS], late["speed"][ROWS], 100 * every["changed"][ROWS]]
    agree([row[2], *row[4:]], values)
    if OPENVINO in found["peers"]:
        agree([row[3]], [every["speed"][PACKED] / every["speed"][OPENVINO]])
    else:
        assert row[3] == "not installed"
    assert "login" in found["source"]
    assert found["guard"]["state"] == "learning"  # "The guard was certified in neither run."


@pytest.mark.parametrize("file", STREAMS_TABLES)
def test_the_streams_beside_the_first_page_were_measured(file: str) -> None:
    streams = measured(file)["streams"]
    rows = table_rows(page("measured.md"), STREAMS_TABLES[file])
    assert [name for name, *_ in rows] == list(streams)
    for name, *cells in rows:
        every, late = streams[name]["parts"]["all"], streams[name]["parts"]["last third"]
        speeds = [every["speed"][way] for way in (OPENVINO, ONNX, PACKED, CACHE, ROWS)]
        agree(cells, [*speeds, late["speed"][ROWS], 100 * every["changed"][ROWS]])


def test_what_rows_gain_without_a_matrix_unit_was_measured() -> None:
    streams, text = measured("streams-avx512.json")["streams"], page("measured.md")
    gaining = ("OpenSSH", "HDFS", "Apache")
    late = {name: stream["parts"]["last third"]["speed"] for name, stream in streams.items()}
    every = {name: stream["parts"]["all"]["speed"] for name, stream in streams.items()}
    template = "Rows are #, # and # times as fast as packed blocks over all lines of OpenSSH, HDFS and Apache"
    says(text, template, *(every[name][ROWS] / every[name][PACKED] for name in gaining))
    gains = [late[name][ROWS] / late[name][way] for way in (PACKED, OPENVINO) for name in gaining]
    template = "In the last third they are #, # and # times as fast as packed blocks, and #, # and # times as fast as"
    says(text, f"{template} OpenVINO.", *gains)
    for name in gaining:
        assert max(late[name], key=lambda way: late[name][way]) == ROWS, "the fastest of all"
    guard = streams["BGL"]["guard"]
    assert guard["state"] == "learning"
    says(text, "not certified within these lines: # of # samples had changed", guard["changed"], guard["verified"])
    assert late["BGL"][ROWS] < late["BGL"][PACKED] == max(late["BGL"].values()), "packed blocks are the fastest"
    amx = [stream["parts"]["all"]["speed"] for stream in measured("streams.json")["streams"].values()]
    packed = [speed[PACKED] for speed in amx]
    says(page("../README.md"), "With AMX packed blocks are # to # times as fast as stock", min(packed), max(packed))
    assert all(speed[ROWS] < speed[PACKED] for speed in amx), "rows under a guard took longer"


@pytest.mark.parametrize("file", ["streams-avx512.json", *STREAMS_TABLES])
def test_the_streams_were_made_as_the_page_says(file: str) -> None:
    text, found = page("measured.md"), measured(file)
    says(text, "the first # lines of four logs, in order of time, # at once", found["lines"], found["batch"])
    says(text, "with the guard (budget # %)", 100 * found["budget"])
    assert len(found["streams"]) == 4
    versions = [".".join(found["packages"][name].split(".")[:2]) for name in ("torch", "openvino", "onnxruntime")]
    says(text, "torch #, OpenVINO # in bfloat16, ONNX Runtime # in float32", *map(float, versions))


def test_the_demos_with_payments_were_measured() -> None:
    demos = measured("demo-payments.json")
    table = table_rows(page("first-steps.md"), "Demos with payments")
    assert [row[0] for row in table] == list(demos)
    for (_, *cells, state), demo in zip(table, demos.values(), strict=True):
        whole, late = demo["parts"]["all"], demo["parts"]["last third"]
        best = min(ms for way, ms in late["ms"].items() if way not in APPROXIMATE)
        speeds = whole["ms"][STOCK], whole["speed"][PACKED], whole["speed"][ROWS], late["speed"][ROWS]
        agree(cells, [whole["texts"], *speeds, best / late["ms"][ROWS], 100 * whole["changed"][ROWS]])
        assert state == demo["guard"]["state"]
    text = page("first-steps.md")
    fresh, last = demos["bfloat16"], demos["float32, without bfloat16"]
    took = "set-up took # and # seconds (packages came from a cache of pip), the demo # and #, its start included"
    says(text, took, *(demo[name] for name in ("set_up_seconds", "demo_seconds") for demo in (fresh, last)))
    assert max(fresh["demo_seconds"], last["demo_seconds"]) <= 90, "as the first page says"
    assert not fresh["peers"], "stock is the best exact peer there"
    assert not last["peers"], "stock is the best exact peer there"
    certified = [demo["parts"]["certified"] for demo in (fresh, last)]
    speeds = [one["speed"][ROWS] for one in certified]
    changed = [100 * one["changed"][ROWS] for one in certified]
    gained = "were # and # times as fast as stock, the best exact peer there, and # and # % of the answers changed"
    says(text, gained, *speeds, *changed)
    peers = demos["bfloat16, peers installed"]["parts"]
    says(text, "In the second one OpenVINO was # times as fast as stock", peers["all"]["speed"][OPENVINO])
    over = [peers[part]["over"][OPENVINO] for part in ("certified", "last third")]
    says(text, "# times as fast as OpenVINO while the guard was certified, and # times in the last third", *over)
    for demo in (fresh["parts"], peers):
        says(text, "Attention maps were # times as fast as stock in the first two", demo["all"]["speed"][MAPS])


def test_what_rows_cost_in_bfloat16_was_measured() -> None:
    text, streams = page("measured.md"), measured("streams.json")["streams"]
    longer = {name: 1 / stream["parts"]["last third"]["over"][PACKED] for name, stream in streams.items()}
    assert longer["OpenSSH"] == min(longer.values())
    says(text, "rows take # (OpenSSH) to # times as long as packed blocks", longer["OpenSSH"], max(longer.values()))
    gains = [gain(measured(AMX), "none", clients) for clients in (64, 2)]
    says(text, "and gains # to # with a certified guard", *gains)
    logs = ("lines-OpenSSH", "lines-HDFS", "lines-Apache")
    says(text, "there rows are # to # times as fast as packed blocks", *spread(logs, "rows", "packed"))
    lines = [stream["parts"]["all"]["ms"][PACKED] for stream in streams.values()]
    says(text, "A line takes # to # ms with packed blocks", min(lines), max(lines))


def test_the_table_of_packed_blocks_and_rows_was_measured() -> None:
    rows = table_rows(page("measured.md"), "| | stock | best exact peer |")
    for (label, name), (first, *cells) in zip(MEASURED_TABLE.items(), rows, strict=True):
        case = RowsCase(name)
        assert first.startswith(label)
        agree(cells[:3], [1, 1 / case.over("stock", EXACT), case.over("packed")])
        share = [100 * case.stats("share_computed")] if "of the rows" in cells[3] else []
        agree(numbers(cells[3]), [case.over("rows"), *share] if "rows" in case.ms else [])
        agree(numbers(cells[4]), case.cosines()[:1])


@pytest.mark.parametrize(
    ("dtype", "start", "machine"),
    [("bfloat16", "| requests, model | stock |", ""), ("float32", "The same in float32, on two cores", ""),
     ("bfloat16", "The same in bfloat16, on two cores", WITHOUT)],
)  # fmt: skip
def test_each_cell_of_the_tables_of_rows_was_measured(dtype: str, start: str, machine: str) -> None:
    ways = ("stock", "torch.compile", f"OpenVINO {'bf16' if dtype == 'bfloat16' else 'f32'}", "OpenVINO int8")
    for (label, name), (first, *cells) in zip(ROWS_TABLES.items(), table_rows(page("rows.md"), start), strict=True):
        case = RowsCase(name, dtype, machine=machine)
        assert first.startswith(label)
        for way, cell in zip(ways, cells[:4], strict=True):
            times = [case.ms[way], case.ms[f"{way}, sorted"]] if way in case.ms else []
            agree(numbers(cell), times if " / " in cell else times[:1])
        agree(numbers(cells[4]), [case.ms["packed"], case.over("packed"), case.over("packed", EXACT)])
        values = list[float]()
        if "rows" in case.ms:
            values = [case.stats("share_computed"), case.ms["rows"], case.over("rows")]
            values += [case.over("rows", EXACT)] * (dtype == "float32") + [case.over("rows", PEER)]
        agree(numbers(cells[5]), values)
        if dtype == "bfloat16":
            agree(numbers(cells[6]), case.cosines() + case.cosines("OpenVINO int8"))


def test_what_is_said_of_rows_without_a_matrix_unit_was_measured() -> None:
    text = page("rows.md")
    cases = {name: RowsCase(name, machine=WITHOUT) for name in ROWS_TABLES.values()}
    lines = [cases[f"lines-{log}"] for log in ("OpenSSH", "HDFS", "BGL", "Apache")]
    stock, best = (sorted(case.over("packed", base) for case in lines) for base in ("stock", EXACT))
    says(text, "Packed blocks of lines: # to # times stock, # to # times the best exact path.",
         stock[0], stock[-1], best[0], best[-1])  # fmt: skip
    shapes = sorted(cases[name].over("packed", EXACT) for name in SHAPES)
    says(text, "Batches of one length: # to # times OpenVINO", shapes[0], shapes[-1])
    base, windows = cases["deberta-base-8x512"], cases["deberta-windows"]
    says(text, "DeBERTa: # (windows) and # (8 × 512) times OpenVINO.",
         windows.over("packed", "the best OpenVINO"), base.over("packed", "the best OpenVINO"))  # fmt: skip
    for name, log in (("OpenSSH", lines[0]), ("HDFS", lines[1])):
        says(text, f"{name} # times stock, # times the best peer, int8 included, cosine # and #",
             log.over("rows"), log.over("rows", PEER), *log.cosines())  # fmt: skip
    says(text, "windows # times OpenVINO, with # of the rows", windows.over("rows", "the best OpenVINO"),
         windows.stats("share_computed"))  # fmt: skip
    rows = [cases[name].over("rows", EXACT) for name in SHAPES]
    says(text, "BERT-base shape # times the best exact path (1 × 128), #, # and #.", *rows)
    texts = [1 / cases[name].over("rows", "packed") for name in ("text-banking77", "text-imdb")]
    says(text, "Text that does not repeat itself takes # and # times as long as with packed blocks.", *texts)
    spent = [100 * case.overhead() for case in lines]
    says(text, "Lookup, plan and fetch: # to # % of the time of packed blocks", min(spent), max(spent))
    spent = [100 * cases[name].overhead() for name in SHAPES]
    says(text, "# % of one sequence with the BERT-base shape, # to # % of batches.", spent[0], min(spent[1:]),
         max(spent[1:]))  # fmt: skip


def test_what_first_rows_gain_was_measured() -> None:
    found = measured("rows.json")["first rows"]
    gains = [found[name]["all rows"] / found[name]["first rows"] for name in ("minilm-sst2", "deberta-loghub")]
    layers = {one["layers"] for one in found.values()}
    says(page("rows.md"), "of # layers # (MiniLM) and # (DeBERTa) times as fast", *layers, *gains)


def test_which_rows_are_worth_computing_was_measured() -> None:
    found = measured("chosen-rows.json")
    header = re.search(r"\| share of rows, mean, 1st percentile \| (.*) \|\n", page("rows.md"))
    assert header is not None
    logs = header[1].split(" | ")
    ways = list(found[logs[0]])
    rows = table_rows(page("rows.md"), "| share of rows, mean, 1st percentile |")
    for way, (label, *cells) in zip(ways, rows, strict=True):
        assert label.replace("`", "").replace("*", "") == way
        for log, cell in zip(logs, cells, strict=True):
            agree(numbers(cell), [found[log][way][name] for name in ("share", "mean", "p1")])
    (share,) = set_in("study_chosen_rows.py", r"\nSHARE = (\S+)")
    says(page("rows.md"), "*More* is # % of a line's tokens", 100 * share)


def test_what_the_page_of_rows_says_of_speed_was_measured() -> None:
    text = page("rows.md")
    template = "are # to # times as fast as the stock model on lines, and # to # times as fast as the best exact peer"
    says(text, template, *spread(LINES, "packed"), *spread(LINES, "packed", EXACT))
    template = "On batches of one length packed blocks are # to # times as fast as OpenVINO"
    says(text, template, *spread(SHAPES, "packed", "the best OpenVINO"))
    template = "# to # times as fast as the stock model on the streams that repeat themselves, and # to # times as"
    says(text, template, *spread(REPEATED, "rows"), *spread(REPEATED, "rows", PEER))
    template = "Rows are # to # times as fast as stock on the streams that repeat themselves"
    says(text, template, *spread(REPEATED, "rows", dtype="float32"))
    template = "# to # times as fast as stock on lines and windows, and about"
    says(text, template, *spread((*LINES, "deberta-windows"), "packed", dtype="float32"))
    template = "and # to # times as fast as the best exact path. OpenVINO's int8"
    says(text, template, *spread(REPEATED, "rows", EXACT, "float32"))


def test_what_the_page_of_rows_says_of_single_cases_was_measured() -> None:
    text, questions, one = page("rows.md"), RowsCase("text-banking77"), RowsCase("bert-1x128")
    left = [one.stats(name) / one.stats("sequences") for name in ("tokens", "rows_computed")]
    says(text, "Of one sequence of # tokens # rows are left", *left)
    longer = [1 / RowsCase(name).over("rows", "packed") for name in ("text-banking77", "text-imdb")]
    says(text, "costs nothing: # and # times the time of packed blocks. Eleven", *longer)
    assert questions.stats("served") == 11
    says(text, "Eleven of # questions of banking77 were served", questions.stats("sequences"))
    strict = RowsCase("lines-HDFS-threshold52")
    template = "A threshold of # brings them nearer, too, with # of the rows: # and #."
    says(text, template, strict.stats("threshold"), strict.stats("share_computed"), *strict.cosines())
    first, stored = RowsCase("lines-OpenSSH"), RowsCase("lines-OpenSSH", storage="int8")
    share = 100 * stored.found["record_bytes"] / first.found["record_bytes"]
    says(text, "records of OpenSSH take # % of the bytes, with the same cosines", share)
    assert stored.cosines() == pytest.approx(first.cosines(), abs=5e-5)


def test_the_share_of_lookup_plan_and_fetch_was_measured() -> None:
    one, *shapes = (100 * RowsCase(name).overhead() for name in SHAPES)
    lines = [100 * RowsCase(f"lines-{log}").overhead() for log in ("OpenSSH", "HDFS", "Apache", "BGL")]
    template = (
        "took # % of the time of packed blocks with MiniLM on OpenSSH and HDFS, # % on Apache, # % on BGL; "
        "# to # % with the BERT-base shape, # % with one sequence"
    )
    for same in lines[:2]:
        says(page("rows.md"), template, same, *lines[2:], min(shapes), max(shapes), one)


def test_the_rows_of_another_machine_were_measured() -> None:
    names = (*(f"lines-{log}" for log in ("OpenSSH", "HDFS", "BGL", "Apache")), "bert-1x128", "bert-8x128")
    cases = [RowsCase(name, machine="another machine") for name in names]
    packed, rows = ([case.over(way) for case in cases] for way in ("packed", "rows"))
    template = (
        "packed blocks # (OpenSSH), # (HDFS), # (BGL) and # (Apache) times as fast as stock, rows #, #, # and #."
    )
    says(page("rows.md"), template, *packed[:4], *rows[:4])
    template = "BERT-base shape: 1 × 128 packed #, rows #; 8 × 128 # and #. DeBERTa-v3-base shape, packed: #."
    last = RowsCase("deberta-base-8x512", machine="another machine").over("packed")
    says(page("rows.md"), template, packed[4], rows[4], packed[5], rows[5], last)
