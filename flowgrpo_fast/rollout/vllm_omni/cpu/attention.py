"""Attention for the CPU platform: torch's SDPA, as the trainer's."""

from __future__ import annotations

import torch

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPABackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuSDPAImpl


class CpuSDPAImpl(SDPAImpl):
    """`AttentionImpl.forward` knows the platforms of the tree only."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: object = None
    ) -> torch.Tensor:
        return self.forward_cuda(query, key, value, attn_metadata)
