"""The attention database: format, writer, reader, catalogue and vector index."""

from attmemo.db.catalogue import SPLIT_HELD_OUT, SPLIT_TRAIN
from attmemo.db.database import Database, Finding, cache_directory, default_path, find_database
from attmemo.db.format import SEQUENCE, EmbedderRef, FileRef, Manifest, ModelInfo, read_manifest
from attmemo.db.forms import KIND_INPUT, KIND_MAP
from attmemo.db.index import BACKENDS, Backend, FlatIndex, LayerIndex
from attmemo.db.writer import DatabaseWriter, Provenance, storing

__all__ = [
    "BACKENDS",
    "KIND_INPUT",
    "KIND_MAP",
    "SEQUENCE",
    "SPLIT_HELD_OUT",
    "SPLIT_TRAIN",
    "Backend",
    "Database",
    "DatabaseWriter",
    "EmbedderRef",
    "FileRef",
    "Finding",
    "FlatIndex",
    "LayerIndex",
    "Manifest",
    "ModelInfo",
    "Provenance",
    "cache_directory",
    "default_path",
    "find_database",
    "read_manifest",
    "storing",
]
