"""Shapes, inputs and calls: what a benchmark runs, and its exact result in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from flowgrpo_fast.ops import NoiseKey, StepCoefficients, philox_normal
from flowgrpo_fast.schedule import make_sigmas, sde_coefficients


@dataclass(frozen=True)
class Shape:
    name: str
    latent: tuple[int, ...]  # of one sample
    tokens: bool = False  # packed [tokens, channels]: the last dimension is a token, which the CFG rescale needs


SHAPES = (
    Shape("SD3.5 512", (16, 64, 64)),  # 16 channels, 512/8 = 64
    Shape("SD3.5 1024", (16, 128, 128)),  # 1024/8 = 128
    Shape("Qwen-Image 512", (1024, 64), tokens=True),  # (512/16)^2 = 32^2 tokens of 16 channels x 2 x 2
    Shape("Qwen-Image 1328", (6889, 64), tokens=True),  # (1328/16)^2 = 83^2
    Shape("Wan 480p 33f", (16, 9, 60, 104)),  # (33 - 1)/4 + 1 = 9 frames, 480/8 = 60, 832/8 = 104
    Shape("Wan 480p 81f", (16, 21, 60, 104)),  # (81 - 1)/4 + 1 = 21
)
ENTRIES = Shape("entries", ())  # of the ops that see no latents: the batch is the number of entries
BATCHES = (1, 8, 32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

GROUP_SIZE = 16
# log ratios of the loss's inputs: both sides of the clip range of 1e-4 and inside, never near its edge, where fp32 rounding decides
LOG_RATIOS = (5e-5, -1.5e-4, 3e-4, 0.0, -5e-5, 1.5e-4, -3e-4)


@dataclass(frozen=True)
class Call:
    """function(*arguments) -> results; the gradients of some arguments, if any, come after the results.

    Tensor arguments are [B, ...], 0-d ones hold for the whole batch.
    """

    function: Callable[..., tuple[Tensor, ...]]
    arguments: tuple[Any, ...]
    leaves: tuple[int, ...] = ()  # positions of the arguments that get a gradient
    upstream: tuple[
        Tensor, ...
    ] = ()  # gradient of each result; empty: the first result is a loss, the others are metrics

    def differentiated(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return results if self.upstream else results[:1]


class Inputs:
    """The tensors of one case, each made when first asked for. Latents x, prev and noise are fp32, as RolloutBatch stores them;
    velocities have the case's dtype. Timesteps of a batch are mixed."""

    def __init__(self, shape: Shape, batch: int, dtype: torch.dtype, device: str) -> None:
        self.shape, self.batch, self.dtype, self.device = shape, batch, dtype, device

    def _randn(self, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(self.batch, *self.shape.latent, generator=generator, device=self.device)

    @cached_property
    def x(self) -> Tensor:
        return self._randn(0)

    @cached_property
    def v(self) -> Tensor:
        return self._randn(1).to(self.dtype)

    @cached_property
    def v_neg(self) -> Tensor:
        return self._randn(2).to(self.dtype)

    @cached_property
    def v_ref(self) -> Tensor:
        return (self.v + 0.5 * self._randn(3)).to(self.dtype)

    @cached_property
    def v_old(self) -> Tensor:
        return (self.v + 1e-3 * self._randn(4)).to(self.dtype)

    @cached_property
    def noise(self) -> Tensor:
        return self._randn(5)

    @cached_property
    def upstream(self) -> Tensor:
        """Gradient of the combined velocity."""
        return self._randn(6).to(self.dtype)

    @cached_property
    def prev(self) -> Tensor:
        column = (-1, *(1,) * len(self.shape.latent))
        a, b, s = (value.view(column) for value in (self.coef.a, self.coef.b, self.coef.s))
        return (self.x * a).add_(self.v * b).add_(self.noise * s)

    @cached_property
    def philox_noise(self) -> Tensor:
        """Sample by sample: the generator works in int64 and fp64."""
        keys = (NoiseKey(self.key.seed, self.key.step, i[None]) for i in self.key.sample_id)
        return torch.cat([philox_normal(key, self.shape.latent) for key in keys])

    @cached_property
    def key(self) -> NoiseKey:
        return NoiseKey(0, 1, torch.arange(self.batch, device=self.device))

    @cached_property
    def sigmas(self) -> Tensor:
        return make_sigmas(10).to(self.device)

    @cached_property
    def index(self) -> Tensor:
        return torch.arange(self.batch, device=self.device) % 8

    @cached_property
    def coef(self) -> StepCoefficients:
        return sde_coefficients(self.sigmas, self.index, noise_level=rivals.NOISE_LEVEL)

    @cached_property
    def schedule(self) -> tuple[Tensor, Tensor, Tensor]:
        """sigma, the next sigma, sigma_1: what the peers' formulas read."""
        return self.sigmas[self.index], self.sigmas[self.index + 1], self.sigmas[1]

    @cached_property
    def weights(self) -> Tensor:
        """Gradients of per-sample results."""
        return torch.linspace(0.5, 1.5, self.batch, device=self.device)

    @cached_property
    def adv(self) -> Tensor:
        return 1.0 - 1.7 * (torch.arange(self.batch, device=self.device) % 5) / 4

    @cached_property
    def denominator(self) -> Tensor:
        return torch.tensor(float(self.batch), device=self.device)

    @cached_property
    def log_ratio(self) -> Tensor:
        return torch.tensor(LOG_RATIOS, device=self.device, dtype=torch.float64).repeat(self.batch // 7 + 1)[
            : self.batch
        ]

    @cached_property
    def old_log_prob(self) -> Tensor:
        return self._old(rivals.log_prob_alone, flat(self.x, self.v, self.prev))

    @cached_property
    def old_log_prob_guided(self) -> Tensor:
        return self._old(
            _guided_log_prob, (*flat(self.x, self.v, self.v_neg, self.prev), self.shape.tokens, self.dtype)
        )

    @cached_property
    def old_log_prob_of_v_old(self) -> Tensor:
        return by_rows(Call(rivals.log_prob_alone, (*flat(self.x, self.v_old, self.prev), *self.schedule)))[0].float()

    def _old(self, function: Callable[..., tuple[Tensor, ...]], latents: tuple[Any, ...]) -> Tensor:
        """Such that the log ratio is LOG_RATIOS."""
        return (by_rows(Call(function, (*latents, *self.schedule)))[0] - self.log_ratio).float()

    @cached_property
    def log_prob_entries(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(7)
        return torch.randn(self.batch, generator=generator, device=self.device) - 1.4

    @cached_property
    def old_log_prob_entries(self) -> Tensor:
        return (self.log_prob_entries.double() - self.log_ratio).float()

    @cached_property
    def rewards(self) -> Tensor:
        return torch.rand(self.batch, generator=torch.Generator(self.device).manual_seed(8), device=self.device)

    @cached_property
    def group(self) -> Tensor:
        return torch.arange(self.batch, device=self.device) // GROUP_SIZE

    def tensors(self) -> list[Tensor]:
        """Those made so far."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def size(self, *names: str) -> int:
        """Bytes of all named tensors; one named twice counts twice."""
        return sum(getattr(self, name).numel() * getattr(self, name).element_size() for name in names)


def flat(*latents: Tensor) -> tuple[Tensor, ...]:
    """The rivals see [B, channels, elements], a view: `torch.compile` makes a new graph for each rank."""
    return tuple(latent.flatten(2) for latent in latents)


def by_rows(call: Call) -> tuple[Tensor, ...]:
    """Exact results and gradients: fp64, sample by sample, so that no case needs fp64 temporaries of a whole batch.

    Per-sample results are joined, 0-d ones (a sum over the batch) added.
    """
    batch = next(a.shape[0] for a in call.arguments if isinstance(a, Tensor) and a.dim() > 0)
    rows = [run(in_fp64(call, slice(i, i + 1))) for i in range(batch)]
    return tuple(torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum() for parts in zip(*rows, strict=True))


def in_fp64(call: Call, rows: slice) -> Call:
    """The same call of some samples in fp64."""

    def widened(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value[rows] if value.dim() else value
        return value.double() if value.is_floating_point() else value

    arguments, upstream = (tuple(map(widened, values)) for values in (call.arguments, call.upstream))
    return ready(replace(call, arguments=arguments, upstream=upstream))


def ready(call: Call) -> Call:
    """The call with its leaves requiring grad; no tensor is copied."""
    arguments = list(call.arguments)
    for position in call.leaves:
        arguments[position] = arguments[position].detach().requires_grad_()
    return replace(call, arguments=tuple(arguments))


def run(call: Call) -> tuple[Tensor, ...]:
    """Results and gradients of a call that is `ready`."""
    results = call.function(*call.arguments)
    if not call.leaves:
        return results
    leaves = [call.arguments[position] for position in call.leaves]
    gradients = torch.autograd.grad(call.differentiated(results), leaves, call.upstream or None)
    return (*(result.detach() for result in results), *gradients)


def exact_guided(v: Tensor, v_neg: Tensor, rescale: bool, dtype: torch.dtype) -> Tensor:
    """The combined velocity in fp64, rounded to the dtype in which it is stored; the gradient passes the rounding unchanged."""
    (combined,) = (rivals.cfg_rescale if rescale else rivals.cfg)(v, v_neg)
    return combined + (combined.to(dtype).double() - combined).detach()


def _guided_log_prob(
    x: Tensor, v: Tensor, v_neg: Tensor, prev: Tensor, rescale: bool, dtype: torch.dtype, *schedule: Tensor
) -> tuple[Tensor, ...]:
    return rivals.log_prob_alone(x, exact_guided(v, v_neg, rescale, dtype), prev, *schedule)
