"""The embedder that turns hidden states into search keys, its training and its calibration."""

from attmemo.embed.calibration import Calibration, fit_calibration
from attmemo.embed.siamese import DIMENSION, SiameseEmbedder, load_embedders, save_embedders

__all__ = ["DIMENSION", "Calibration", "SiameseEmbedder", "fit_calibration", "load_embedders", "save_embedders"]
