"""Whisper's encoder: BART's attention over a fixed number of audio frames, without a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attmemo.models.bart import BartAdapter


class WhisperAdapter(BartAdapter):
    """`encoder.layers.i.self_attn`; the input is log-mel features of 30 seconds."""

    family = "whisper"
    models = ("Whisper",)
    limits = "the decoder stays exact; rows are refused"
    audio = True

    def sample(self, model: nn.Module) -> tuple[dict[str, Tensor], list[int]]:
        host: Any = self.host(model)
        frames = int(host.config.max_source_positions)
        length = frames * host.conv1.stride[0] * host.conv2.stride[0]
        features = torch.sin(torch.arange(host.config.num_mel_bins * length) * 0.731)
        dtype = next(model.parameters()).dtype
        return {"input_features": features.view(1, -1, length).to(dtype)}, [frames]
