"""Measures `attmemo serve`: throughput, latency and overload, with the load generator wrk on the same machine.

    python scripts/bench_serve.py SHARED OUT warm direct rows none plain infinity genai rates turns overload

Each part adds its numbers to OUT/serve.json, so that parts can be run one by one. `warm` fills a database with the
first 70 % of the lines of a log until its guard is certified. The other parts ask the later 30 %, and store nothing:
no line that is asked was stored before, however often the load generator repeats it. ATTMEMO_DTYPE=bfloat16 measures
that type of number, in every server. `plain` is a server as people
write it, FastAPI around sentence-transformers; `genai` the same around OpenVINO GenAI's text-embedding pipeline;
`infinity` the server of infinity-emb, which wants other versions of packages: ATTMEMO_INFINITY names its program.
ATTMEMO_SECONDS is the length of a run of wrk. wrk must be installed (apt-get install wrk).
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attmemo.profiler.process import apart
from attmemo.profiler.turns import alternate

LOG = "OpenSSH"
LONGEST = 256  # tokens of a line, as the model was trained
CLIENTS = (64, 8, 1)
SECONDS = float(os.environ.get("ATTMEMO_SECONDS", "8"))
ROUNDS = 5
CROWD, PRESSURE = 3000, 3.6  # clients of an overload; they wait for answers too: three times saturation
PORT = int(os.environ.get("ATTMEMO_BENCH_PORT", "3987"))
DTYPE = os.environ.get("ATTMEMO_DTYPE", "float32")
INFINITY = os.environ.get("ATTMEMO_INFINITY", "infinity_emb")
GUARDED = ("--budget", "0.01")
ROUTES = {"infinity": ("/embeddings", "input")}
"""Where a server answers, and the field of the texts; other servers as text-embeddings-inference."""
URL = f"http://127.0.0.1:{PORT}"
LUA = """
local lines, n = {}, 0
for line in io.lines("%s") do lines[#lines + 1] = line end
function request()
  n = n + 1
  return wrk.format("POST", "%s", {["content-type"] = "application/json"}, lines[n %% #lines + 1])
end
"""
DELAY = "\nfunction delay() return -math.log(1 - math.random()) * %f end\n"  # milliseconds; arrivals by chance


def lines_of(shared: Path) -> tuple[list[str], list[str]]:
    """Earlier and later lines of the log."""
    lines = (shared / "data" / "loghub_2k" / f"{LOG}_2k.log").read_text(errors="replace").splitlines()
    cut = 7 * len(lines) // 10
    return lines[:cut], lines[cut:]


def model() -> str:
    """The folder of the model."""
    from attmemo.profiler.demo import model_path

    return model_path()


@contextmanager
def server(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=5).read()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {' '.join(words)}") from None
                time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def attmemo(*options: str) -> tuple[str, ...]:
    """The command of our server."""
    own = (sys.executable, "-c", "from attmemo.cli import main; main()", "serve", model())
    return (*own, "--host", "127.0.0.1", "--port", str(PORT), "--drain-seconds", "0", "--dtype", DTYPE, *options)


def post(path: str, body: Any) -> Any:
    """An answer in JSON."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def get(path: str) -> bytes:
    """What a route gives."""
    return urllib.request.urlopen(URL + path, timeout=30).read()


def cpu_seconds(process: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> int:
    """Megabytes of a process that are not of files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return 0 if found is None else int(found[1]) // 1000


def stolen_seconds() -> float:
    """Processor seconds that the host gave to others while this machine had work for them."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


def wrk(
    folder: Path, lines: list[str], clients: int, seconds: float, rate: float | None = None, batch: int = 1,
    server: str = "",
) -> Any:  # fmt: skip
    """One run of wrk; with `rate`, each client waits between its requests, so that about so many come in a second."""
    route, field = ROUTES.get(server, ("/embed", "inputs"))
    bodies = [lines[start : start + batch] for start in range(0, len(lines) - batch + 1, batch)]
    with (folder / "bodies").open("w") as stream:
        stream.writelines(json.dumps({field: own if batch > 1 else own[0]}) + "\n" for own in bodies)
    script = LUA % (folder / "bodies", route)
    (folder / "load.lua").write_text(script + (DELAY % (1e3 * clients / rate) if rate else ""))
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}", "--timeout", "30", "--latency", "-s"]
    before = os.times()
    text = subprocess.run([*command, str(folder / "load.lua"), URL], capture_output=True, text=True, check=True).stdout
    after = os.times()
    unit = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}

    def percentile(which: str) -> float:
        found = re.search(rf"^\s+{which}%\s+([\d.]+)(us|ms|s|m)", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1]) * unit[found[2]]

    def counted(pattern: str) -> int:
        found = re.search(pattern, text)
        return 0 if found is None else int(found[1])

    rate_seen = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert rate_seen is not None, text
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "clients": clients, "lines_per_second": float(rate_seen[1]) * batch, "requests": counted(r"(\d+) requests in"),
        "p50_ms": percentile("50"), "p90_ms": percentile("90"), "p99_ms": percentile("99"),
        "not_2xx": counted(r"Non-2xx or 3xx responses: (\d+)"), "timeouts": counted(r"timeout (\d+)"),
        "cores_of_wrk": used / seconds,
    }  # fmt: skip


def warm(shared: Path, out: Path, folder: Path) -> Any:
    """Fill a database, and have its guard certified."""
    early, _ = lines_of(shared)
    shutil.rmtree(out / "serve-db", ignore_errors=True)
    start = time.monotonic()
    asked = 0
    with server(*attmemo(*GUARDED, "--database", str(out / "serve-db"))):
        while asked < 12:
            for at in range(0, len(early), 100):
                post("/embed", {"inputs": early[at : at + 100]})
            asked += 1
            state = json.loads(get("/live"))["guard"]
            if state["state"] == "certified":
                break
        shown = json.loads(get("/live"))
    return {
        "passes": asked, "seconds": time.monotonic() - start, "says": shown["guard"]["says"],
        "records": shown["database"]["records"],
    }  # fmt: skip


def direct(shared: Path, out: Path, folder: Path, ways: tuple[str, ...] = ("stock", "none", "rows")) -> Any:
    """The library without a server, batches of 32."""
    import torch
    from sentence_transformers import SentenceTransformer

    from attmemo import memoize, unmemoize

    _, late = lines_of(shared)
    found: dict[str, Any] = {}
    choices: dict[str, Any] = {
        "stock": None, "none": {"reuse": "none"},
        "rows": {"database": out / "serve-db", "budget": 0.01, "fill": False},
    }  # fmt: skip
    for name in ways:
        options = choices[name]
        encoder = SentenceTransformer(model(), device="cpu").to(getattr(torch, DTYPE))
        # As the server has it: unit length is made of the embedding, and is no part of the answer.
        own = SentenceTransformer(modules=list(encoder)[:2], device="cpu")
        if options is not None:
            memoize(own, **options)
        batches = [late[at : at + 32] for at in range(0, len(late), 32)]
        start = time.perf_counter()
        while time.perf_counter() - start < 4:  # as long as the service is warmed up
            for batch in batches:
                own.encode(batch, show_progress_bar=False)
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < SECONDS:
            for batch in batches:
                own.encode(batch, show_progress_bar=False)
                count += len(batch)
        found[name] = {"lines_per_second": count / (time.perf_counter() - start)}
        if options is not None:
            stats = own.attmemo.stats()
            found[name] |= {"share_computed": stats["share_computed"]}
            unmemoize(own)
    return found


def turns(shared: Path, out: Path, folder: Path) -> Any:
    """The library and the service in turns."""
    _, late = lines_of(shared)

    def own() -> dict[str, float]:
        return {"library": apart(direct, shared, out, folder, ("rows",))["rows"]["lines_per_second"]}

    def served() -> dict[str, float]:
        with server(*attmemo(*GUARDED, "--database", str(out / "serve-db"), "--fill", "no")):
            wrk(folder, late, 64, 4)
            single, many = wrk(folder, late, 64, SECONDS), wrk(folder, late, 2, SECONDS, batch=32)
        return {"single": single["lines_per_second"], "batches_of_32": many["lines_per_second"]}

    rounds = list[dict[str, float]]()
    for number in range(ROUNDS):
        found: dict[str, float] = {}
        for measure in alternate((own, served), number):
            found |= measure()
        rounds.append(found)
        print("round", json.dumps(found), flush=True)
    return {"rounds": rounds} | {
        f"{way}_of_library": statistics.median(one[way] / one["library"] for one in rounds)
        for way in ("single", "batches_of_32")
    }


def asked(shared: Path, folder: Path, *words: str, name: str = "") -> Any:
    """Closed loops of clients against one server."""
    _, late = lines_of(shared)
    with server(*words) as process:
        wrk(folder, late, 8, 3, server=name)
        before, start = cpu_seconds(process.pid), time.monotonic()
        found: dict[str, Any] = {"single": [wrk(folder, late, clients, SECONDS, server=name) for clients in CLIENTS]}
        found["cores_of_server"] = (cpu_seconds(process.pid) - before) / (time.monotonic() - start)
        found["batches_of_32"] = wrk(folder, late, 2, SECONDS, batch=32, server=name)
        if "serve" in words:
            shown = json.loads(get("/live"))
            found |= {"share_computed": shown["rows"] / shown["tokens"], "guard": shown["guard"]}
    return found


def rows(shared: Path, out: Path, folder: Path) -> Any:
    """Our server with records."""
    return asked(shared, folder, *attmemo(*GUARDED, "--database", str(out / "serve-db"), "--fill", "no"))


def none(shared: Path, out: Path, folder: Path) -> Any:
    """Our server without records: exact."""
    return asked(shared, folder, *attmemo("--reuse", "none"))


def plain(shared: Path, out: Path, folder: Path) -> Any:
    """A server as people write it."""
    return asked(shared, folder, sys.executable, __file__, str(shared), str(out), "plain-server")


def infinity(shared: Path, out: Path, folder: Path) -> Any:
    """infinity's own server, on torch."""
    if shutil.which(INFINITY) is None:
        return {"left_out": "not installed: pip install 'infinity-emb[server,torch]', in an environment of its own"}
    options = {"--engine": "torch", "--device": "cpu", "--dtype": DTYPE, "--port": str(PORT), "--host": "127.0.0.1"}
    words = (word for pair in options.items() for word in pair)
    return asked(
        shared, folder, INFINITY, "v2", "--model-id", model(), "--no-bettertransformer", *words, name="infinity"
    )


def genai(shared: Path, out: Path, folder: Path) -> Any:
    """A server as people write it, around OpenVINO GenAI."""
    if importlib.util.find_spec("openvino_genai") is None:
        return {"left_out": "not installed: pip install openvino-genai"}
    return asked(shared, folder, sys.executable, __file__, str(shared), str(out), "genai-server")


def rates(shared: Path, out: Path, folder: Path) -> Any:
    """Latency at half of saturation, requests arriving by chance; each round has a saturation of its own."""
    _, late = lines_of(shared)
    rounds = list[Any]()
    with server(*attmemo(*GUARDED, "--database", str(out / "serve-db"), "--fill", "no")):
        wrk(folder, late, 8, 3)
        for _ in range(ROUNDS):
            full = wrk(folder, late, 64, SECONDS)["lines_per_second"]
            before = stolen_seconds()
            half = wrk(folder, late, 256, 20, rate=full / 2)
            taken = (stolen_seconds() - before) / 20
            over = half["p99_ms"] / half["p50_ms"]
            rounds.append({"saturation": full, "half": half, "p99_over_median": over, "cores_stolen": taken})
            print("round", json.dumps(rounds[-1]), flush=True)
    return {"rounds": rounds, "p99_over_median": statistics.median(one["p99_over_median"] for one in rounds)}


def overload(shared: Path, out: Path, folder: Path) -> Any:
    """Three times saturation for a minute, then full speed again."""
    import numpy as np

    _, late = lines_of(shared)
    with server(*attmemo(*GUARDED, "--database", str(out / "serve-db"), "--fill", "no")) as process:
        wrk(folder, late, 8, 3)
        full = wrk(folder, late, 64, SECONDS)
        exact = np.array(post("/embed", {"inputs": late[:100], "reuse": "off"}))
        memory = [resident(process.pid)]
        pressed: list[Any] = []
        lowest, checked, refused = 1.0, 0, 0
        for _ in range(3):  # wrk in the background; beside it, answers are looked at
            pid = os.fork()
            if pid == 0:
                found = wrk(folder, late, CROWD, 20, rate=PRESSURE * full["lines_per_second"])
                (folder / "pressed.json").write_text(json.dumps(found))
                os._exit(0)
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                place = checked % 100
                try:
                    (vector,) = post("/embed", {"inputs": late[place]})
                except urllib.error.HTTPError as error:
                    if error.code != 429:
                        raise
                    refused += 1
                    time.sleep(0.02)
                    continue
                lowest = min(lowest, float(np.dot(vector, exact[place])))
                checked += 1
            pressed.append(json.loads((folder / "pressed.json").read_text()))
            memory.append(resident(process.pid))
        time.sleep(2)
        after = wrk(folder, late, 64, SECONDS)
        failures = {
            name: float(value)
            for name, value in re.findall(rb'te_request_failure\{err="(\w+)"\} (\S+)', get("/metrics"))
        }
    return {
        "offered_over_saturation": [one["lines_per_second"] / full["lines_per_second"] for one in pressed],
        "saturation": full, "pressed": pressed, "after_two_seconds": after, "resident_mb": memory,
        "answers_checked": checked, "refused_to_the_checker": refused, "lowest_cosine_to_exact": lowest,
        "failures": {name.decode(): count for name, count in failures.items()},
    }  # fmt: skip


def plain_server() -> None:
    """FastAPI around sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model(), device="cpu").to(getattr(torch, DTYPE))
    answer(lambda texts: encoder.encode(texts, show_progress_bar=False).tolist())


def genai_server() -> None:
    """FastAPI around OpenVINO GenAI's pipeline, which answers one request at a time."""
    from attmemo.profiler.models import collate, load_model, own_pooling, tokenize
    from attmemo.profiler.peers import pipelines, runtimes
    from attmemo.profiler.peers.stream import Text

    with tempfile.TemporaryDirectory() as name:
        folder, loaded = Path(name), load_model(model())
        (folder / "genai").mkdir()
        runtimes.convert_openvino(loaded, collate(loaded, tokenize(loaded, ["a", "b c"], 8)), folder / "model.xml")
        pipelines.write_genai(loaded, folder / "model.xml", folder / "genai", LONGEST)
        precision = "bf16" if DTYPE == "bfloat16" else "f32"
        way, turn = pipelines.genai(folder / "genai", own_pooling(model()), LONGEST, precision), threading.Lock()

        def embed(texts: list[str]) -> list[list[float]]:
            with turn:
                return way([Text(0, [], None, text) for text in texts]).tolist()

        answer(embed)


def answer(encode: Callable[[list[str]], list[list[float]]]) -> None:
    """Serve embeddings over HTTP, each request by itself."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    app = FastAPI()

    class Body(BaseModel):
        inputs: str | list[str]

    @app.post("/embed")
    def embed(body: Body) -> list[list[float]]:
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        return encode(texts)

    @app.get("/health")
    def health() -> None: ...

    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False)


PARTS = {
    "warm": warm, "direct": direct, "rows": rows, "none": none, "plain": plain, "infinity": infinity,
    "genai": genai, "rates": rates, "overload": overload, "turns": turns,
}  # fmt: skip
SERVERS = {"plain-server": plain_server, "genai-server": genai_server}


def main() -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *SERVERS])
    args = parser.parse_args()
    if args.parts[0] in SERVERS:
        SERVERS[args.parts[0]]()
        return
    if shutil.which("wrk") is None:
        parser.error("wrk is not installed: apt-get install wrk")
    from measured_at import measured_at, processor_of

    from attmemo.profiler.peers.table import measured_under

    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "serve.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            result = PARTS[part](args.shared, args.out, Path(folder))
        found[part] = {"load_before": before, **result}
        under, at = measured_under(), measured_at()
        found["conditions"] = under | {
            "log": LOG, "model": Path(model()).parent.name, "dtype": DTYPE, "version": at["commit"],
            "date": at["date"], "processor": processor_of(under["features"]),
        }  # fmt: skip
        file.write_text(json.dumps(found, indent=1))
        print(part, json.dumps(found[part], indent=1))


if __name__ == "__main__":
    main()
