"""A RolloutBatch between two processes on one GPU, without leaving it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.rollout.cuda_ipc import device_uuid, fetch, share


def batch(device: str) -> RolloutBatch:
    g = torch.Generator().manual_seed(0)
    index = torch.arange(4)
    return RolloutBatch(
        latents=torch.randn(4, 3, 16, 64, generator=g), log_probs=torch.randn(4, 2, generator=g),
        step_index=torch.arange(2).repeat(4, 1), sigmas=torch.linspace(1, 0, 6), prompt_index=index // 4, group_id=index // 4,
        sample_id=index, seed=torch.zeros_like(index), prompt_embeds=torch.randn(1, 5, 8, generator=g).bfloat16(),
        prompt_embeds_mask=torch.ones(1, 5, dtype=torch.bool), policy_version=3, height=64, width=64,
        images=torch.randint(0, 256, (4, 3, 64, 64), generator=g, dtype=torch.uint8),
    ).to(device).validate()  # fmt: skip


def send(pipe: Connection) -> None:
    packed = batch("cuda").pack()
    pipe.send(share(packed))
    pipe.recv()  # until then `packed` must live


@pytest.mark.gpu
def test_a_batch_stays_on_the_gpu() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=send, args=(far_end,))
    process.start()
    got = RolloutBatch.unpack(fetch(pipe.recv(), torch.device("cuda", 0)))
    pipe.send("copied")
    process.join(60)
    assert process.exitcode == 0
    for name, tensor in batch("cuda").tensors().items():
        assert got.tensors()[name].is_cuda
        assert torch.equal(got.tensors()[name], tensor), name


@pytest.mark.gpu
def test_another_gpu_is_refused() -> None:
    address = {**share(torch.zeros(16, dtype=torch.uint8, device="cuda")), "uuid": "another"}
    with pytest.raises(ValueError, match="the tensor lies on GPU another"):
        fetch(address, torch.device("cuda", 0))


def test_a_cpu_has_no_uuid() -> None:
    assert device_uuid(torch.device("cpu")) is None
