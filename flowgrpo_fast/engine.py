"""The DeepSpeed engine: LoRA or full fine-tuning under ZeRO 0-3, whole weights for a rollout phase, reference policy, checkpoints.

The only file that touches DeepSpeed. Gradient accumulation is unmanaged: `backward` accumulates, `step` is the boundary,
so nothing depends on DeepSpeed's own micro-step counter.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from peft import LoraConfig as PeftLoraConfig
from torch import Tensor, nn

from flowgrpo_fast.config import BatchPlan, Config, ConfigError, OptimizerConfig
from flowgrpo_fast.models.base import ModelAdapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LORA = "policy"
BUCKET = 500_000_000
# DeepSpeed 0.19 calls collectives by the names that torch 2.13 is about to retire: one warning a call, and nothing a user can do.
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)


def has_half_master(config: Config) -> bool:
    """Trained weights in bf16 with DeepSpeed's fp32 master copy. LoRA adapters are fp32 by themselves."""
    return config.model.train == "full" and config.model.dtype == "bfloat16"


def clips_by_itself(config: Config) -> bool:
    """ZeRO stage 0 in fp32 runs a plain torch optimizer: DeepSpeed would clip, but tell nobody the norm."""
    return config.engine.zero_stage == 0 and not has_half_master(config)


def deepspeed_config(config: Config, plan: BatchPlan, trainable_parameters: int | None = None) -> dict[str, Any]:
    """The dict handed to DeepSpeed, derived from ours: nothing is set twice."""
    o = config.optimizer
    # fp32 adapters over a half-precision base need the section off: `bf16.enabled` would cast the adapters too.
    half_master = has_half_master(config)
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if clips_by_itself(config) else o.max_grad_norm,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": config.engine.zero_stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            # A buffer of this many elements is allocated whole: DeepSpeed's default would take 2 GB for a model of any size.
            "reduce_bucket_size": min(trainable_parameters or BUCKET, BUCKET),
            "stage3_param_persistence_threshold": config.engine.persistence_threshold,
        },
        "bf16": {"enabled": half_master},
        # Dozens of micro-batches added up in bf16 would lose the small ones.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if half_master and config.engine.zero_stage >= 2 else {}),
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            # torch's Adam: no compiler needed on the user's machine.
            "params": {
                "lr": o.learning_rate,
                "betas": o.betas,
                "eps": o.eps,
                "weight_decay": o.weight_decay,
                "torch_adam": True,
            },
        },
    }


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Rate of update `update` (from 0): linear warm-up, then constant, linear to 0 or cosine to 0. A function of the step alone, so resume needs no state."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    progress = (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
    falling = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * max(0.0, falling)


def add_lora(transformer: nn.Module, config: Config, adapter: ModelAdapter) -> None:
    """PEFT LoRA in fp32 over the frozen base. Raises ConfigError where the target modules match nothing."""
    lora = config.model.lora
    targets = lora.target_modules or adapter.lora_target_modules
    with torch.random.fork_rng():
        # Every rank draws the same initial adapter.
        torch.manual_seed(config.seed)
        transformer.requires_grad_(False)
        try:
            transformer.add_adapter(  # type: ignore[operator]
                PeftLoraConfig(
                    r=lora.rank,
                    lora_alpha=lora.alpha,
                    target_modules=targets,
                    init_lora_weights="gaussian" if lora.init == "gaussian" else True,
                ),
                adapter_name=LORA,
            )
        except ValueError as error:
            names = sorted(
                {name.rpartition(".")[2] for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}
            )
            raise ConfigError(
                f"model.lora.target_modules = {targets!r}: {error}; linear layers here end in {', '.join(names)}"
            ) from error
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


class Engine:
    """Owns the transformer. `module` is the bare network, `self(...)` runs it through DeepSpeed's hooks."""

    def __init__(self, config: Config, plan: BatchPlan, adapter: ModelAdapter, total_updates: int) -> None:
        self.config, self.total_updates, self.updates = config, total_updates, 0
        transformer = adapter.load_transformer()
        self.reference: nn.Module | None = None
        if config.model.train == "lora":
            add_lora(transformer, config, adapter)
        else:
            transformer.requires_grad_(True)
            if config.algorithm.kl_coef > 0:
                self.reference = self._frozen_copy(adapter, plan)
        if config.engine.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        # No dropout: the replay must be the network that sampled.
        transformer.eval()
        trainable = [p for p in transformer.parameters() if p.requires_grad]
        self.trainable_parameters = sum(p.numel() for p in trainable)
        settings = deepspeed_config(config, plan, self.trainable_parameters)
        self.engine, *_ = deepspeed.initialize(model=transformer, model_parameters=trainable, config=settings)
        self.module: nn.Module = self.engine.module
        self.module.eval()
        self._own_norm = math.nan
        if clips_by_itself(config):
            self.engine.optimizer.register_step_pre_hook(lambda *_: self._clip(trainable))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> tuple[float, float, bool]:
        """One optimizer update from what was accumulated. Returns (gradient norm before clipping, learning rate, whether it was applied).

        DeepSpeed drops an update with a non-finite gradient, on all ranks alike; weights and `updates` then stay as they are.
        """
        rate = learning_rate(self.config.optimizer, self.updates, self.total_updates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        applied = bool(self.engine.was_step_applied())
        self.updates += applied
        norm = self.engine.get_global_grad_norm()
        return float(self._own_norm if norm is None else norm), rate, applied

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        """Clips the reduced gradients. Raises FloatingPointError, on all ranks alike, where their norm is not finite."""
        norm = nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm, error_if_nonfinite=False)
        self._own_norm = float(norm)
        if not math.isfinite(self._own_norm):
            raise FloatingPointError(
                f"gradient norm {self._own_norm} in update {self.updates}; lower optimizer.learning_rate"
            )

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """The complete network for a phase of forwards without gradient, gathered once.

        DeepSpeed's hooks would repartition on the first forward, and ranks with unequal numbers of forwards would then
        wait for each other for ever: they are off inside.
        """
        if self.config.engine.zero_stage < 3:
            yield
            return
        offload = self.engine.optimizer.parameter_offload
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        # Setting the hooks up pushes the module on a global stack: without this pop it would grow by one a phase.
        FWD_MODULE_STACK.pop()
        try:
            with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
                yield
        finally:
            offload.setup_zero_stage3_hooks()

    @contextmanager
    def reference_policy(self) -> Iterator[Any]:
        """A callable with the weights before training: adapters off (LoRA) or the frozen copy (full)."""
        if self.reference is not None:
            yield self.reference
            return
        self.module.disable_adapters()  # type: ignore[operator]
        try:
            yield self.engine
        finally:
            self.module.enable_adapters()  # type: ignore[operator]

    def save(self, folder: Path) -> None:
        """Every rank calls this. Trained parameters and optimizer state; the frozen base is not copied.

        Raises what the writing of this rank's files raised, but only after all of DeepSpeed's collectives: a rank that left
        early would leave the others waiting at its barrier.
        """
        writer, failures = self.engine.checkpoint_engine, []
        write = writer.save

        def recording(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except Exception as error:
                failures.append(error)

        writer.save = recording
        try:
            self.engine.save_checkpoint(
                str(folder), tag="state", client_state={"updates": self.updates}, exclude_frozen_parameters=True
            )
        finally:
            del writer.save
        if failures:
            raise failures[0]

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises FileNotFoundError where there is nothing."""
        path, client_state = self.engine.load_checkpoint(str(folder), tag="state", load_module_strict=False)
        if path is None:
            raise FileNotFoundError(f"no DeepSpeed state in {folder}")
        self.updates = client_state["updates"]

    def close(self) -> None:
        """Frees what DeepSpeed holds on to: hooks, partitions, buffers."""
        self.engine.destroy()

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter], write: bool = False) -> Iterator[None]:
        """These parameters whole inside. A collective: every rank enters. write: every rank assigns the same values, which stay."""
        if self.config.engine.zero_stage < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield

    @staticmethod
    def numel(parameter: nn.Parameter) -> int:
        """Of the whole parameter, which holds nothing while it is partitioned."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def trained_state(self) -> dict[str, Tensor]:
        """Trained parameters by name, whole, on the CPU. A collective: every rank calls it."""
        named = self.trained()
        with self.gathered(list(named.values())):
            return {name: p.detach().cpu().clone() for name, p in named.items()}

    @torch.no_grad()
    def set_trained(self, state: dict[str, Tensor]) -> None:
        """Puts values into the network, not into the optimizer's master copies: the next step goes on from those. A collective."""
        named = self.trained()
        with self.gathered(list(named.values()), write=True):
            for name, parameter in named.items():
                parameter.copy_(state[name])

    def _frozen_copy(self, adapter: ModelAdapter, plan: BatchPlan) -> Any:
        reference = adapter.load_transformer().requires_grad_(False).eval()
        if self.config.engine.zero_stage < 3:
            return reference
        settings = deepspeed_config(self.config, plan)
        del settings["optimizer"]
        engine, *_ = deepspeed.initialize(model=reference, config=settings)
        engine.module.eval()
        return engine


def local_device() -> torch.device:
    """This rank's device, as DeepSpeed chooses it (DS_ACCELERATOR=cpu keeps a CUDA machine on its CPU)."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(accelerator.current_device_name())


def remove_shared_buffer() -> None:
    """Unlinks the 69 MB of DeepSpeed's CPU all-reduce in /dev/shm, which it leaves there even after a normal exit."""
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)
