"""The attention database: format, writer, reader, catalogue and vector index."""

from attmemo.db.catalogue import SPLIT_HELD_OUT, SPLIT_TRAIN
from attmemo.db.database import Database, Finding
from attmemo.db.discover import cache_directory, default_path, filling_path, find_database
from attmemo.db.files import file_digest, storing
from attmemo.db.index import BACKENDS, Backend, FlatIndex, LayerIndex
from attmemo.db.manifest import SEQUENCE, EmbedderRef, FileRef, Manifest, ModelInfo, read_manifest
from attmemo.db.slot_kinds import KIND_INPUT, KIND_MAP, SlotKind
from attmemo.db.writer import DatabaseWriter, Provenance

__all__ = [
    "BACKENDS", "KIND_INPUT", "KIND_MAP", "SEQUENCE", "SPLIT_HELD_OUT", "SPLIT_TRAIN", "Backend", "Database",
    "DatabaseWriter", "EmbedderRef", "FileRef", "Finding", "FlatIndex", "LayerIndex", "Manifest", "ModelInfo",
    "Provenance", "SlotKind", "cache_directory", "default_path", "file_digest", "filling_path", "find_database",
    "read_manifest", "storing",
]  # fmt: skip
