"""Other ways to the same answers: the stock model, other runtimes, a cache of exact duplicates."""

from attmemo.profiler.peers.installed import ONNX, OPENVINO, installed_peers
from attmemo.profiler.peers.ways import Duplicates, Way, another, way_of

__all__ = ["ONNX", "OPENVINO", "Duplicates", "Way", "another", "installed_peers", "way_of"]
