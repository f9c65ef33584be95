"""The DeepSpeed engine: LoRA or full fine-tuning under ZeRO 0-3, whole weights for a rollout phase, reference policy, EMA, checkpoints.

This package is the only one that touches DeepSpeed: settings.py derives its dict, loading.py fills the partitions, ema.py averages them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import Tensor, nn

from flowgrpo_fast import comm
from flowgrpo_fast.algorithms import uses_reference
from flowgrpo_fast.config import Config
from flowgrpo_fast.engine.ema import OLD_POLICY_DECAY, Ema, Masters, average_decay
from flowgrpo_fast.engine.loading import add_lora, load_partitioned, saved_buffers
from flowgrpo_fast.engine.sequence_parallel import SequenceParallel
from flowgrpo_fast.engine.settings import clips_by_itself, coalesces, deepspeed_config, learning_rate, stage
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.plan import BatchPlan
from flowgrpo_fast.profile import span

# DeepSpeed 0.19 calls collectives by the names that torch 2.13 is about to retire: one warning a call, and nothing a user can do.
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)


class _NotFinite(Exception):
    """Out of an optimizer step that must not happen."""


class Engine:
    """Owns the transformer. `module` is the bare network, `self(...)` runs it through DeepSpeed's hooks."""

    def __init__(
        self, config: Config, plan: BatchPlan, adapter: ModelAdapter, total_updates: int, resharded: bool = False
    ) -> None:
        """resharded: `load` will read DeepSpeed's universal format, of a checkpoint that another number of ranks has written."""
        self.config, self.total_updates, self.updates, self.stage = config, total_updates, 0, stage(config)
        transformer = self._load(adapter, plan)
        self.reference: nn.Module | None = None
        if config.model.train == "lora":
            add_lora(transformer, config, adapter)
        else:
            transformer.requires_grad_(True)
            if uses_reference(config.algorithm):
                self.reference = self._frozen_copy(adapter, plan)
        if config.engine.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        if config.engine.compile_blocks:
            transformer.compile_repeated_blocks(dynamic=False)  # type: ignore[operator]
        # No dropout: the replay must be the network that sampled.
        transformer.eval()
        trainable = [p for p in transformer.parameters() if p.requires_grad]
        self.trainable_parameters = sum(self.numel(p) for p in trainable)
        settings = deepspeed_config(config, plan, self.trainable_parameters)
        if resharded:
            settings["checkpoint"]["load_universal"] = True
        self.coalesces = coalesces(config)
        self.engine, *_ = deepspeed.initialize(model=transformer, model_parameters=trainable, config=settings)
        self.module: nn.Module = self.engine.module
        self.module.eval()
        self._own_norm = math.nan
        if clips_by_itself(config):
            self.engine.optimizer.register_step_pre_hook(lambda *_: self._clip(trainable))
        self.sequence_parallel: SequenceParallel | None = None
        if plan.sequence_parallel > 1:
            self.sequence_parallel = SequenceParallel(self.module, plan.sequence_parallel, self.engine.device)
        self.ema: Ema | None = None
        if config.ema.decay is not None:
            self.ema = Ema(Masters(self.engine, self.stage), average_decay(config.ema))
        self.old_policy: Ema | None = None
        if config.algorithm.old_policy != "copy":
            self.old_policy = Ema(Masters(self.engine, self.stage), OLD_POLICY_DECAY[config.algorithm.old_policy])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with span("forward"):
            return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        with span("backward"):
            self.engine.backward(loss)

    def sharing_forwards(self) -> AbstractContextManager[None]:
        """Around training forwards: sequence-parallel ranks act as one inside."""
        return nullcontext() if self.sequence_parallel is None else self.sequence_parallel.active()

    def accumulation(self) -> AbstractContextManager[None]:
        """Around the backwards of one update: with coalescing, gradients are reduced once, at its end."""
        return self.engine.coalesce_grad_reduction() if self.coalesces else nullcontext()

    def step(self) -> tuple[float, float, bool]:
        """One optimizer update from what was accumulated. Returns (gradient norm before clipping, learning rate, whether it was applied).

        DeepSpeed drops an update with a non-finite gradient, on all ranks alike; weights and `updates` then stay as they are.
        """
        rate = learning_rate(self.config.optimizer, self.updates, self.total_updates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        try:
            with span("optimizer"):
                self.engine.step()
            applied = bool(self.engine.was_step_applied())
        except _NotFinite:
            self.engine.optimizer.zero_grad()
            applied = False
        self.updates += applied
        if applied and self.ema is not None:
            self.ema.update()
        norm = self.engine.get_global_grad_norm()
        return float(self._own_norm if norm is None else norm), rate, applied

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        """Clips the reduced gradients. Raises _NotFinite, on all ranks alike, where their norm is not finite."""
        norm = nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm, error_if_nonfinite=False)
        self._own_norm = float(norm)
        if not math.isfinite(self._own_norm):
            raise _NotFinite

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """The complete network for a phase of forwards without gradient, gathered once.

        DeepSpeed's hooks would repartition on the first forward, and ranks with unequal numbers of forwards would then
        wait for each other for ever: they are off inside.
        """
        if self.stage < 3:
            yield
            return
        offload = self.engine.optimizer.parameter_offload
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        # Setting the hooks up pushes the module on a global stack: without this pop it would grow by one a phase.
        FWD_MODULE_STACK.pop()
        try:
            with ExitStack() as stack:
                with span("gather"):
                    stack.enter_context(deepspeed.zero.GatheredParameters(list(self.module.parameters())))
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
                str(folder),
                tag="state",
                client_state={"updates": self.updates, "rng": torch.get_rng_state()},
                exclude_frozen_parameters=True,
            )
            for name, average in self.averages().items():
                try:
                    average.save(folder / name)
                except Exception as error:
                    failures.append(error)
        finally:
            del writer.save
        if failures:
            raise failures[0]

    def load(self, folder: Path, universal: Path | None = None) -> None:
        """Restores what `save` wrote; universal: the same in DeepSpeed's universal format. Raises FileNotFoundError where there is nothing."""
        path, client_state = self.engine.load_checkpoint(
            str(universal or folder), tag="state", load_module_strict=False
        )
        if path is None:
            raise FileNotFoundError(f"no DeepSpeed state in {universal or folder}")
        self.updates = client_state["updates"]
        # Ours draws from keyed generators only; a user's reward may not. After a change of ranks there is no state of this rank.
        if universal is None:
            torch.set_rng_state(client_state["rng"])
        for name, average in self.averages().items():
            average.load(folder / name)

    def averages(self) -> dict[str, Ema]:
        """By the folder that they have in a checkpoint."""
        return {name: e for name, e in (("ema", self.ema), ("old_policy", self.old_policy)) if e is not None}

    @cached_property
    def base_fingerprint(self) -> int:
        """Checksum of the frozen parameters' bits, a frozen reference's too, the same for any number of ranks; 0 without any. A collective, at
        its first use.

        They are not in a checkpoint: a resumed run reads them from the base model again, which must be the same.
        """
        total = 0
        networks = [self.module] if self.reference is None else [self.module, self.reference]
        for name, parameter in (entry for network in networks for entry in network.named_parameters()):
            if parameter.requires_grad:
                continue
            whole = self.numel(parameter)
            local, at = parameter.detach().reshape(-1), 0
            if self.stage == 3:
                local = parameter.ds_tensor.detach().reshape(-1)  # type: ignore[attr-defined]
                at = comm.rank() * len(local)
                local = local[: max(0, whole - at)]
            bits = local.view(torch.int32 if local.element_size() == 4 else torch.int16).long()
            position = torch.arange(at, at + len(bits), device=bits.device)
            total += int((bits * (position % 65_521 + 1)).sum()) * (len(name) + 1)
        if self.stage == 3:
            total = sum(comm.gather_objects(total))
        return total % 2**63

    @contextmanager
    def marked_gathers(self) -> Iterator[None]:
        """DeepSpeed's gathers inside forwards and backwards, and those of whole phases, as spans of a profile."""
        if self.stage < 3:
            yield
            return
        coordinator = self.engine.optimizer.parameter_offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module

        def marked(*args: Any, **kwargs: Any) -> Any:
            with span("gather"):
                return fetch(*args, **kwargs)

        coordinator.fetch_sub_module = marked
        try:
            yield
        finally:
            del coordinator.fetch_sub_module

    def close(self) -> None:
        """Frees what DeepSpeed holds on to: hooks, partitions, buffers."""
        self.engine.destroy()

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter], write: bool = False) -> Iterator[None]:
        """These parameters whole inside. A collective: every rank enters. write: every rank assigns the same values, which stay."""
        if self.stage < 3:
            yield
            return
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield

    @staticmethod
    def numel(parameter: Tensor) -> int:
        """Of the whole parameter, which holds nothing while it is partitioned."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    @contextmanager
    def sampling_weights(self) -> Iterator[None]:
        """What validation samples and exports hold: the average where there is one and the config wants it, else the weights. A collective."""
        if self.ema is None or not self.config.ema.sample:
            yield
            return
        with self.ema.swapped():
            yield

    def old_weights(self) -> AbstractContextManager[None]:
        """Inside, the network is the old policy, which samples and is compared with (algorithm.old_policy). A collective."""
        return nullcontext() if self.old_policy is None else self.old_policy.swapped()

    def _saved(self) -> dict[str, Tensor]:
        """Each parameter, and each buffer that belongs to a checkpoint."""
        return dict(self.module.named_parameters()) | saved_buffers(self.module)

    def parameter_bytes(self) -> dict[str, int]:
        """Of each parameter, whole, and of each buffer that belongs to a checkpoint."""
        return {name: self.numel(t) * t.element_size() for name, t in self._saved().items()}

    def gather_to_main(self, names: list[str]) -> dict[str, Tensor] | None:
        """These parameters whole, and buffers, on the CPU of rank 0; None elsewhere. A collective."""
        saved = self._saved()
        wanted = {name: saved[name] for name in names}
        with self.gathered([t for t in wanted.values() if isinstance(t, nn.Parameter)]):
            if comm.rank() != 0:
                return None
            return {name: t.detach().cpu().clone() for name, t in wanted.items()}

    def peft_config(self, adapter_name: str) -> dict[str, Any]:
        network: Any = self.module
        return dict(network.peft_config[adapter_name].to_dict())

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

    def _load(self, adapter: ModelAdapter, plan: BatchPlan) -> nn.Module:
        if self.stage < 3:
            return adapter.load_transformer()
        return load_partitioned(adapter, deepspeed_config(self.config, plan))

    def _frozen_copy(self, adapter: ModelAdapter, plan: BatchPlan) -> Any:
        reference = self._load(adapter, plan).requires_grad_(False).eval()
        if self.stage < 3:
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
