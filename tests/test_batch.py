"""RolloutBatch: packing, views, joining, splitting, and what `validate` refuses."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from flowgrpo_fast.batch import ALIGNMENT, BatchError, RolloutBatch


def make_batch(
    groups: int = 2, G: int = 3, W: int = 2, L: int = 5, negative: str = "shared", first: int = 0
) -> RolloutBatch:
    B = groups * G
    g = torch.Generator().manual_seed(first)
    mask = torch.ones(groups, L, dtype=torch.bool)
    mask[0, L - 1] = False
    rows = {"none": 0, "shared": 1, "each": groups}[negative]
    return RolloutBatch(
        latents=torch.randn(B, W + 1, 4, 8, generator=g),
        log_probs=torch.randn(B, W, generator=g),
        step_index=torch.arange(W).expand(B, W).contiguous(),
        sigmas=torch.linspace(1, 0, 6),
        prompt_index=torch.arange(groups).repeat_interleave(G),
        group_id=first + torch.arange(groups).repeat_interleave(G),
        sample_id=first * G + torch.arange(B),
        seed=torch.full((B,), 7),
        prompt_embeds=torch.randn(groups, L, 16, generator=g).bfloat16(),
        prompt_embeds_mask=mask,
        policy_version=3,
        height=16,
        width=32,
        negative_prompt_embeds=torch.arange(rows * 48.0).view(rows, 3, 16) if rows else None,
        negative_prompt_embeds_mask=torch.ones(rows, 3, dtype=torch.bool) if rows else None,
        images=torch.randint(0, 256, (B, 3, 16, 32), dtype=torch.uint8, generator=g),
    )


def assert_same(a: RolloutBatch, b: RolloutBatch) -> None:
    assert a.tensors().keys() == b.tensors().keys()
    for name, t in a.tensors().items():
        assert t.dtype == b.tensors()[name].dtype, name
        assert torch.equal(t, b.tensors()[name]), name
    assert (a.policy_version, a.height, a.width) == (b.policy_version, b.height, b.width)


@pytest.mark.parametrize("negative", ["none", "shared", "each"])
def test_pack_unpack_is_exact_and_copies_nothing(negative: str) -> None:
    batch = make_batch(negative=negative).validate()
    buffer = batch.pack()
    again = RolloutBatch.unpack(buffer).validate()
    assert_same(batch, again)
    low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    for name, t in again.tensors().items():
        assert low <= t.data_ptr() < high, f"{name} is a copy"
        assert (t.data_ptr() - low) % ALIGNMENT == 0, f"{name} is not aligned"
    again.latents[0, 0, 0, 0] = 42.0
    assert RolloutBatch.unpack(buffer).latents[0, 0, 0, 0] == 42.0


def test_the_same_batch_gives_the_same_bytes_in_whatever_memory() -> None:
    batch = make_batch()
    zeros, ones = (batch.pack(torch.full((batch.packed_size(),), fill, dtype=torch.uint8)) for fill in (0, 255))
    assert torch.equal(zeros, ones)


def test_packing_uses_no_pickle_and_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle or tolist used")

    monkeypatch.setattr(pickle, "dumps", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    assert_same(make_batch(), RolloutBatch.unpack(make_batch().pack()))


def test_empty_batch_packs() -> None:
    batch = make_batch().select(torch.empty(0, dtype=torch.int64)).validate()
    assert RolloutBatch.unpack(batch.pack()).size == 0


def damaged_buffers() -> list[tuple[str, torch.Tensor, str]]:
    good = make_batch().pack()
    magic, version, header = good.clone(), good.clone(), good.clone()
    magic[0] = 0
    version[4] = 99
    header[20] = 255
    return [
        ("magic", magic, "not a RolloutBatch"),
        ("version", version, "format version 99"),
        ("header", header, "corrupt header"),
        ("payload cut", good[:-4096].clone(), "truncated"),
        ("header cut", good[:40].clone(), "truncated"),
        ("prefix cut", good[:8].clone(), "truncated"),
        ("dtype", good.view(torch.int8), "uint8"),
    ]


@pytest.mark.parametrize(("buffer", "message"), [pytest.param(b, m, id=n) for n, b, m in damaged_buffers()])
def test_unpack_refuses_damage(buffer: torch.Tensor, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        RolloutBatch.unpack(buffer)


@pytest.mark.parametrize("negative", ["none", "shared", "each"])
def test_split_then_concat_is_the_identity(negative: str) -> None:
    batch = make_batch(negative=negative)
    parts = batch.split_prompts()
    assert [p.size for p in parts] == [3, 3]
    assert_same(batch, RolloutBatch.concat(parts).validate())


def test_concat_pads_shorter_text_and_moves_prompt_rows() -> None:
    joined = RolloutBatch.concat([make_batch(L=5), make_batch(L=7, first=10)]).validate()
    assert joined.prompt_embeds.shape == (4, 7, 16)
    assert not joined.prompt_embeds_mask[1, 5:].any()
    assert joined.prompt_index.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert joined.negative_prompt_embeds is not None
    assert joined.negative_prompt_embeds.shape[0] == 1  # the same negative prompt stays one row


def test_concat_refuses_what_does_not_belong_together() -> None:
    batch = make_batch()
    with pytest.raises(BatchError, match="policy_version differs: 3 and 4"):
        RolloutBatch.concat([batch, replace(batch, policy_version=4)])
    with pytest.raises(BatchError, match="sigmas differ"):
        RolloutBatch.concat([batch, replace(batch, sigmas=batch.sigmas.flip(0).contiguous())])
    with pytest.raises(BatchError, match="images"):
        RolloutBatch.concat([batch, batch.without_media()])


def broken_batches() -> list[tuple[str, RolloutBatch, str]]:
    batch = make_batch()
    nan, infinite, far, prompt = (
        batch.latents.clone(),
        batch.log_probs.clone(),
        batch.step_index.clone(),
        batch.prompt_index.clone(),
    )
    nan[4, 1, 0, 0] = float("nan")
    infinite[2, 0] = float("inf")
    far[5, 1] = 5
    prompt[1] = 2
    return [
        ("nan", replace(batch, latents=nan), r"latents: non-finite value in sample 4 \(sample_id 4\)"),
        ("inf", replace(batch, log_probs=infinite), "log_probs: non-finite value in sample 2"),
        ("step", replace(batch, step_index=far), r"step_index: sample 5 .* \[0, 5\)"),
        ("prompt", replace(batch, prompt_index=prompt), r"prompt_index: sample 1 .* \[0, 2\)"),
        ("dtype", replace(batch, latents=batch.latents.double()), "latents: dtype torch.float64"),
        ("layout", replace(batch, latents=batch.latents.transpose(2, 3)), "latents: not contiguous"),
        ("rows", replace(batch, group_id=batch.group_id[:-1]), r"group_id: shape \[5\], expected first dimension 6"),
        ("window", replace(batch, latents=batch.latents[:, :-1].contiguous()), r"latents: shape .*expected \[6, 3, 4, 8\]"),
        ("images", replace(batch, height=17), "images: shape"),
        ("negative", replace(batch, negative_prompt_embeds_mask=None), "go together"),
    ]  # fmt: skip


@pytest.mark.parametrize(("batch", "message"), [pytest.param(b, m, id=n) for n, b, m in broken_batches()])
def test_validate_names_field_and_sample(batch: RolloutBatch, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch.validate()
