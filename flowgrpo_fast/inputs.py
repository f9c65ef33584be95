"""Everything of a run that can be checked before a model is loaded, and how the config reads as sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from flowgrpo_fast.algorithms import build_advantage, build_algorithm
from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.data.prompts import PromptRecord, load_prompts
from flowgrpo_fast.models import adapter_class, resolve_model_path
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.plan import BatchPlan, batch_plan
from flowgrpo_fast.rewards import RewardManager, RewardSpec
from flowgrpo_fast.rollout.agent_loop import agent_loop_class
from flowgrpo_fast.rollout.base import SamplingParams
from flowgrpo_fast.schedule import WindowConfig, draw_bucket, window_size


def window_config(config: Config) -> WindowConfig:
    w = config.rollout.window
    window_range = None if w.range is None else (w.range[0], w.range[1])
    return WindowConfig(w.size, window_range, w.scope, w.strategy, shift_every=w.shift_every, shift_by=w.shift_by)


def rollout_size(config: Config) -> MediaSize:
    return MediaSize(config.rollout.height, config.rollout.width, config.rollout.frames)


def step_size(config: Config, step: int) -> MediaSize:
    """Of the samples of a training step."""
    r = config.rollout
    if not r.size_buckets:
        return rollout_size(config)
    height, width = r.size_buckets[draw_bucket(config.seed, step, len(r.size_buckets))]
    return MediaSize(height, width, r.frames)


def sampling_params(
    config: Config, window: int, keep_old_v: bool = False, size: MediaSize | None = None
) -> SamplingParams:
    """How training samples are drawn. size: None is rollout.height x width."""
    r = config.rollout
    return SamplingParams(
        **(size or rollout_size(config))._asdict(),
        num_steps=r.num_steps,
        guidance_scale=r.guidance_scale,
        rule=r.rule,
        noise_level=r.noise_level,
        log_prob_form=config.algorithm.log_prob_form,
        log_prob_reduction=config.algorithm.log_prob_reduction,
        window_size=window,
        initial_noise=r.initial_noise,
        seed=config.seed,
        ode_order=r.ode_order,
        keep_old_v=keep_old_v,
    )


def validation_params(config: Config) -> SamplingParams:
    """How validation samples are drawn: the ODE, fixed seed, one sample a prompt."""
    r, v = config.rollout, config.validation
    return replace(
        sampling_params(config, 0),
        num_steps=v.num_steps or r.num_steps,
        guidance_scale=v.guidance_scale or r.guidance_scale,
        initial_noise="sample",
        seed=v.seed,
    )


def require_negative_prompts(config: Config, records: list[PromptRecord], guidance_scale: float, what: str) -> None:
    if adapter_class(config.model.family).needs_negative(guidance_scale) and config.data.negative_prompt is None:
        missing = next((r for r in records if r.negative_prompt is None), None)
        if missing is not None:
            raise ConfigError(
                f"{what} = {guidance_scale} needs a negative prompt, and prompt {missing.index} ({missing.prompt[:60]!r}) has none:"
                ' set data.negative_prompt (" " is usual for Qwen-Image), or guidance_scale: 1.0'
            )


def require_pairs(config: Config, process: str, records: list[PromptRecord]) -> None:
    """Offline preferences: an algorithm over finished samples, groups of two, and both files of each prompt."""
    if process != "forward" or config.algorithm.group_size != 2:
        raise ConfigError(
            f"rollout.agent_loop = preferences needs algorithm.name dpo (or another over the forward process) and group_size 2, got"
            f" {config.algorithm.name} and {config.algorithm.group_size}"
        )
    for record in records:
        for key in ("chosen", "rejected"):
            file = record.metadata.get(key)
            if file is None or not Path(str(file)).expanduser().is_file():
                raise ConfigError(
                    f"prompt {record.index} ({record.prompt[:60]!r}) has {key} {file!r}, which is no file; write the path of an image"
                )


TOKENIZED_AT_ONCE = 256


def require_images(records: list[PromptRecord], family: str, most: int) -> None:
    """Of each prompt the same number: a batch holds their latents in one tensor."""
    count = len(records[0].images)
    for record in records:
        name = f"prompt {record.index} ({record.prompt[:60]!r})"
        if not 1 <= len(record.images) <= most:
            raise ConfigError(
                f'{name} has {len(record.images)} images: {family} edits 1{f" to {most}" if most > 1 else ""}; write {{"prompt": ..., "image": PATH}}'
            )
        if len(record.images) != count:
            raise ConfigError(
                f"{name} has {len(record.images)} images, prompt {records[0].index} {count}: give all as many"
            )
        for image in record.images:
            if not Path(image).expanduser().is_file():
                raise ConfigError(
                    f"{name} has image {image!r}, which is no file (a relative path counts from {Path.cwd()})"
                )


class Inputs:
    """Everything that can be checked before a model is loaded. Raises ConfigError or PromptFileError."""

    def __init__(self, config: Config, world_size: int) -> None:
        resolve_model_path(config.model.path)
        if config.rollout.backend == "vllm_omni":
            from flowgrpo_fast.rollout.vllm_omni.preflight import check

            check(config)
        self.agent_loop = agent_loop_class(config.rollout.agent_loop)
        self.algorithm, self.advantage = build_algorithm(config.algorithm), build_advantage(config.algorithm)
        if self.algorithm.process == "forward" and config.rollout.overlap:
            raise ConfigError(
                f"rollout.overlap: {config.algorithm.name} has no ratio that would correct samples of an older policy; unset it"
            )
        samples_ode = self.algorithm.process == "forward" and config.rollout.agent_loop != "preferences"
        if samples_ode and config.rollout.initial_noise == "group":
            raise ConfigError(
                f"rollout.initial_noise = 'group': {config.algorithm.name} samples by the ODE, and all samples of a group would be one; set sample"
            )
        self.train_records = load_prompts(config.data.train, "train")
        if config.rollout.agent_loop == "preferences":
            require_pairs(config, self.algorithm.process, self.train_records)
        self.validation_records: list[PromptRecord] = []
        if config.data.validation is not None:
            self.validation_records = load_prompts(config.data.validation, "validation")[
                : config.validation.num_prompts
            ]
        if most := adapter_class(config.model.family).max_source_images:
            require_images(self.train_records + self.validation_records, config.model.family, most)
        if 0 < len(self.validation_records) < world_size:
            raise ConfigError(
                f"{len(self.validation_records)} validation prompts for {world_size} ranks: raise validation.num_prompts to at least {world_size}"
            )
        require_negative_prompts(config, self.train_records, config.rollout.guidance_scale, "rollout.guidance_scale")
        scale = config.validation.guidance_scale or config.rollout.guidance_scale
        require_negative_prompts(config, self.validation_records, scale, "validation guidance_scale")
        try:
            self.rewards = RewardManager(
                [RewardSpec(r.name, r.kwargs, r.weight, r.label, r.held_out) for r in config.rewards],
                max_retries=config.rewarding.max_retries,
                workers=config.rewarding.workers,
                patience_s=config.rewarding.patience_s,
            )
        except ValueError as error:
            raise ConfigError(f"rewards: {error}") from error
        self.world_size = world_size

    def plan(self, config: Config, adapter: ModelAdapter) -> tuple[BatchPlan, Tensor]:
        """Batch arithmetic and the rollout's sigmas. Raises ConfigError, for a window outside the schedule too."""
        r = config.rollout
        try:
            sigmas = adapter.sigmas(r.num_steps, rollout_size(config), r.sigmas)
            slots = config.algorithm.train_timesteps
            if self.algorithm.process == "reverse":
                slots = window_size(window_config(config), sigmas, r.rule, r.noise_level)
            for bucket in r.size_buckets:
                if len(bucket) != 2:
                    raise ConfigError(f"rollout.size_buckets: {bucket} is not a [height, width]")
                adapter.latent_shape(MediaSize(bucket[0], bucket[1], r.frames))
            # All prompts now, not the first that is too long hours into a run.
            records = self.train_records + self.validation_records
            negatives = [record.negative_prompt for record in records] + [config.data.negative_prompt]
            texts = list(dict.fromkeys([record.prompt for record in records] + [n for n in negatives if n is not None]))
            # One by one would be a millisecond each, a minute for 50,000.
            for start in range(0, len(texts), TOKENIZED_AT_ONCE):
                adapter.tokenize(texts[start : start + TOKENIZED_AT_ONCE], r.max_sequence_length)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        trained = self.algorithm.trained_per_group()
        plan = batch_plan(config, self.world_size, slots, self.agent_loop.turns, trained)
        if self.algorithm.shares_noise and plan.micro_batch_size % trained:
            raise ConfigError(
                f"engine.micro_batch_size {plan.micro_batch_size}: {config.algorithm.name} compares the {trained} samples of a group; set a multiple of"
                f" {trained}"
            )
        return plan, sigmas
