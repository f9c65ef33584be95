"""One typed, strict configuration: every key, its bounds, and what does not go together. config_file.py reads it from YAML.

Unknown keys, wrong types and impossible combinations raise ConfigError before any work starts, naming the key, the
value and the fix.
"""

from __future__ import annotations

from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, model_validator


class ConfigError(ValueError):
    """A configuration that cannot run: the message names the key, the value and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class LoraConfig(Section):
    """Of model.train lora. Adapters are fp32, whatever the base is in."""

    rank: int = Field(32, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(64.0, gt=0)
    """Scale of the adapter is alpha / rank."""
    target_modules: list[str] | str | None = None
    """Module name suffixes, or "all-linear"; null takes the model family's preset."""
    init: Literal["gaussian", "default"] = "gaussian"
    """Of the A matrices: `gaussian`, or PEFT's own default. B begins at 0 in either case."""


class ModelConfig(Section):
    family: str = "qwen_image"
    """Adapter: a registered family or `module:Class`."""
    path: str
    """A diffusers folder, or `builtin:glyphs`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the transformer's weights in forward passes. Trained weights and optimizer state are fp32 in either case."""
    train: Literal["full", "lora"] = "lora"
    """The whole transformer, or LoRA adapters beside its frozen weights."""
    lora: LoraConfig = LoraConfig()


class DataConfig(Section):
    train: str
    """`builtin:glyphs`, or a .txt, .jsonl or .parquet file."""
    validation: str | None = None
    """As `train`: held-out prompts; null: no validation."""
    negative_prompt: str | None = None
    """For records that have none of their own. Needed when guidance_scale > 1."""
    shuffle: bool = True
    """A fresh order of the prompts in each epoch; false: the file's."""


class WindowSection(Section):
    """The steps that are sampled as an SDE and trained; all others are the ODE's."""

    size: int | None = Field(None, ge=1)
    """Trained SDE steps per sample; null trains every step but the degenerate ones."""
    range: list[int] | None = Field(None, min_length=2, max_length=2)
    """[lo, hi): the window lies inside these step indices."""
    scope: Literal["sample", "group", "batch"] = "group"
    """Who shares the window's start: each sample has its own, each group, or the whole step."""
    strategy: Literal["random", "progressive"] = "random"
    """`random`: a start is drawn each step. `progressive`: it begins at lo and moves on, back to lo past the end."""
    shift_every: int = Field(25, ge=1)
    """progressive: steps between two moves."""
    shift_by: int = Field(1, ge=1)
    """progressive: denoising steps a move."""


class SigmasConfig(Section):
    """The schedule of noise levels from 1 to 0."""

    kind: Literal["pipeline", "single_shift", "double_shift", "dynamic_shift"] = "pipeline"
    """`pipeline`: as the checkpoint's own scheduler config says, by the family's adapter."""
    shift: float = Field(3.0, gt=0)
    """single_shift and double_shift only."""
    mu: float | None = None
    """dynamic_shift only, and needed there."""
    shift_terminal: float | None = None
    """Stretch the schedule so that its last value above 0 is this; null: as it is. Not read by `pipeline`."""


class ServerConfig(Section):
    """Rollout servers: one vllm-omni engine each, in processes of their own."""

    replicas: int = Field(1, ge=0)
    """Servers that the first rank of each node starts."""
    addresses: list[str] = []
    """Servers started by hand (`python -m flowgrpo_fast.rollout.serve`), e.g. tcp://10.0.0.2:5555. Used by all nodes."""
    devices: list[int] | None = None
    """GPUs of a node's servers as CUDA_VISIBLE_DEVICES names them, tensor_parallel_size for each replica in order; null: all that the
    trainer may see, in order."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of one engine."""
    cpu: bool = False
    """Run the engine on the CPU: for tests and laptops."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a server; null: all cores, divided by the replicas."""
    start_timeout_s: float = Field(600.0, gt=0)
    """How long a server may take to load and to answer first."""
    request_timeout_s: float = Field(900.0, gt=0)
    """How long one request may take before the server counts as lost. Less than engine.timeout_s."""
    bucket_mb: float = Field(512.0, gt=0)
    """Full weights travel in buckets of this size, two of them in memory."""
    engine: dict[str, Any] = {}
    """More keyword arguments for AsyncOmni. Those that would break exactness are refused by name."""


class RolloutConfig(Section):
    """How samples are made."""

    backend: Literal["in_process", "vllm_omni"] = "in_process"
    """`vllm_omni`: servers of their own, see docs/vllm_omni.md. The keys from `python` to `server` are for them."""
    python: str | None = None
    """Interpreter of the environment that has vllm-omni; null: this one."""
    colocated: bool = False
    """The servers share the trainer's GPUs: they sleep while it trains."""
    overlap: bool = False
    """Sample step t + 1 while step t is trained: one step off-policy, corrected by the ratio to the rollout's own log-probs."""
    check_every: int = Field(50, ge=1)
    """Replay some samples in the trainer at the first step and every so many steps: the agreement gate."""
    max_failures: int = Field(5, ge=0)
    """Lost servers and failed requests of a run, after which it ends."""
    server: ServerConfig = ServerConfig()
    agent_loop: str = "single_turn"
    """Registered name or `module:Class`."""
    height: int = Field(512, ge=16)
    """Pixels."""
    width: int = Field(512, ge=16)
    """Pixels."""
    size_buckets: list[list[int]] = []
    """Sizes [height, width] of training samples: each step takes one of them, drawn by seed and step, for all its samples. Empty: height x width
    alone. Validation has height x width in any case."""
    frames: int = Field(1, ge=1)
    """Of a video; 1 for images."""
    num_steps: int = Field(10, ge=1)
    """Denoising steps of a training sample."""
    guidance_scale: float = Field(1.0, ge=1.0)
    """True CFG; 1.0 is off and costs one forward instead of two."""
    rule: Literal["sde", "cps", "dance"] = "sde"
    """SDE of the window: FlowGRPO, Flow-CPS or DanceGRPO."""
    noise_level: float = Field(0.7, gt=0)
    """eta; at most 1 for cps."""
    sigmas: SigmasConfig = SigmasConfig()
    window: WindowSection = WindowSection()
    initial_noise: Literal["sample", "group"] = "sample"
    """`group`: all samples of a group start from the same noise; the ODE steps before the window are then done once per group."""
    ode_order: Literal[1, 2] = 1
    """Of the ODE steps after the window, and of samples without one: 1 is Euler; 2 extrapolates from the step before (MixGRPO samples the rest with a second-order solver, in fewer steps)."""
    groups_per_batch: int = Field(1, ge=1)
    """Groups in one forward."""
    max_sequence_length: int = Field(512, ge=1)
    """Prompt tokens, template not counted; a longer prompt is an error, never cut."""


class AlgorithmConfig(Section):
    """Advantages and loss."""

    name: str = "flow_grpo"
    """Registered name or `module:Class`."""
    group_size: int = Field(16, ge=2)
    """Samples of one prompt."""
    groups_per_step: int = Field(8, ge=1)
    """Prompts per training step, over all ranks."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer updates a step, each on its share of the prompts. From the second on, the ratio leaves 1."""
    advantage: str = "group"
    """Estimator: `group`, `gdpo` (each reward normalised by itself, then weighted), or `module:function`."""
    train_timesteps: int = Field(4, ge=1)
    """Forward-process algorithms (diffusion_nft, awm, dpo): noise levels at which each sample is trained."""
    timesteps: Literal["uniform", "logit_normal", "schedule"] = "uniform"
    """Where those lie: evenly in (0, 1), each drawn inside its own share; around the middle; or among the rollout's own sigmas."""
    old_policy: Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999"] = "copy"
    """diffusion_nft, awm: who samples and is compared with. `copy`: the policy as each rollout finds it. The others: a slow average,
    old = d old + (1 - d) policy after each step, with d = min(0.5, 0.001 step) or min(0.999, 0.0075 max(0, step - 75))."""
    beta: float | None = Field(None, gt=0)
    """diffusion_nft: step away from the old policy, 0.1. dpo: strength of the KL, 2000. null: these."""
    matching: Literal["uniform", "sigma", "ghuber"] = "uniform"
    """awm: its log-prob from a pair's error e. `uniform`: -e (the paper's choice). `sigma`: -sigma e. `ghuber`: -4 sigma e^(1/4), the default of its released configs."""
    train_on: int | None = Field(None, ge=2)
    """Of each group, train on so many samples: the best and the worst half of them (DanceGRPO's best-of-n), by advantage; null: all."""
    normalize: Literal["global_std", "group_std", "none"] = "global_std"
    """What advantages are divided by: the std of all rewards of the step, that of the group, or nothing (Dr.GRPO)."""
    advantage_eps: float = Field(1e-4, ge=0)
    """Added to that std."""
    advantage_clip: float | None = Field(5.0, gt=0)
    """Bound on |advantage|; null: none."""
    clip_low: float = Field(1e-4, gt=0)
    """ratio - 1 is clipped at minus this."""
    clip_high: float = Field(1e-4, gt=0)
    """ratio - 1 is clipped at this."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy; 0 builds no reference."""
    kl_form: Literal["gaussian", "flow_grpo", "velocity_mse"] = "gaussian"
    """`gaussian`: the true KL of the step. `flow_grpo`: its divisor is std_dev_t^2, so under rule sde the KL times -dt. `velocity_mse`: mean((v - v_ref)^2)."""
    step_weight: Literal["none", "noise_level"] = "none"
    """`noise_level`: a step's loss in proportion to its noise s, mean 1 over the trainable steps (TempFlow-GRPO)."""
    divergence_limit: float = Field(1e-5, gt=0)
    """flow_dppo only: a sample is dropped beyond it, where its update would lead further away."""
    log_prob_form: Literal["gaussian", "flow_grpo"] = "gaussian"
    """`gaussian`: the density. `flow_grpo`: -mean((x' - mu)^2), without variance and constants."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Over the latent elements. Under `mean` the ratio is the true one to the power 1/D; clip ranges go with it."""
    old_log_probs: Literal["auto", "rollout", "trainer"] = "auto"
    """`rollout`: those of the rollout. `trainer`: recomputed here (on-policy: the current ones, detached).
    `auto`: in process, the rollout's where the replay has the rollout's batch shape, the trainer's elsewhere; with vllm-omni, the
    rollout's while the agreement gate finds them within a tenth of the clip range."""


class RewardConfig(Section):
    """One of several rewards, which are added by weight."""

    name: str
    """Registered name or `module:function`."""
    kwargs: dict[str, Any] = {}
    """Arguments of the reward."""
    weight: float = 1.0
    """Of this reward in the sum."""
    label: str | None = None
    """Its name in metrics and errors; null: `name`."""
    held_out: bool = False
    """Logged as held_out/<label> and never trained on: what improves with the trained rewards alone is reward hacking."""


class RewardingConfig(Section):
    normalize: bool = False
    """z-score each component over the batch before weighting."""
    workers: int = Field(1, ge=1)
    """Reward calls at a time. With more than one, rewards must be safe to call from several threads."""
    max_retries: int = Field(3, ge=0)
    """Of a reward that raises a transient error, at least."""
    patience_s: float = Field(600.0, ge=0)
    """How long to wait, with back-off, for a reward service that is down, before its samples count as failed. Less than engine.timeout_s."""
    max_failure_share: float = Field(0.1, ge=0, le=1)
    """The run stops when more than this share of a step's samples has no valid reward."""


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(3e-4, gt=0)
    """Peak, after the warm-up."""
    betas: list[float] = Field([0.9, 0.999], min_length=2, max_length=2)
    """Decay of the first and of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled: times the learning rate, off each weight at each update."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    warmup_updates: int = Field(0, ge=0)
    """The rate rises linearly over so many updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to 0 at the last update."""


class EngineConfig(Section):
    """DeepSpeed, memory and speed."""

    zero_stage: Literal[0, 1, 2, 3] = 3
    """3: parameters, gradients and optimizer are cut up among the ranks; 2: the last two; 1: the optimizer; 0: nothing."""
    persistence_threshold: int = Field(100_000, ge=0)
    """ZeRO-3 keeps parameters smaller than this whole on every rank instead of gathering them at each use."""
    frozen_base: Literal["partitioned", "replicated"] = "partitioned"
    """Of a LoRA run. `replicated`: whole on every rank, no gathers; gradients and optimizer of the adapters stay sharded (ZeRO 2)."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where the partitions of the parameters lie when they are not used. Needs zero_stage 3."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where master weights and moments lie."""
    nvme_path: str | None = None
    """Folder on a local NVMe disk, for what is offloaded there. Needs Debian's libaio-dev."""
    coalesce_gradients: bool | None = None
    """Add up the gradients of all micro-batches on the rank and reduce them once an update. null: for LoRA, whose gradients are small."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward instead of keeping them."""
    compile_blocks: bool = False
    """torch.compile each transformer block. Compiled forwards round differently: old log-probs then come from the trainer."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share each training forward (Ulysses): for sequences whose activations do not fit one device."""
    deterministic: bool = False
    """torch's deterministic algorithms everywhere; an operation that has none raises."""
    timeout_s: float = Field(1800.0, gt=0)
    """A rank that makes no progress for this long ends the job with its stack."""
    micro_batch_size: int | None = Field(None, ge=1)
    """(sample, step) pairs per forward; null takes the rollout's batch, which replays it in the same shape."""
    threads: int | None = Field(None, ge=1)
    """CPU threads per rank; null takes cores / ranks."""


class EmaConfig(Section):
    """Exponential moving average of the trained weights, fp32, sharded like the optimizer."""

    decay: float | None = Field(None, gt=0, lt=1)
    """null: no average. flow_grpo takes 0.9 and validates with it."""
    warmup: bool = True
    """decay_n = min(decay, (1 + n) / (10 + n)) at update n."""
    sample: bool = True
    """Validation samples come from the average, and exports hold it."""


class TrainerConfig(Section):
    total_steps: int = Field(100, ge=1)
    """A step is a rollout and its updates."""
    validate_every: int = Field(0, ge=0)
    """In steps; 0 validates before and after only."""
    save_every: int = Field(0, ge=0)
    """In steps; 0 saves at the end only."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest n, and the best."""
    best_metric: str = "reward"
    """Of validation: among the checkpoints saved at steps that were validated, the one where it is highest is kept besides the newest."""
    profile_steps: list[int] = []
    """Steps (from 1) that write profile/step_*.json, a Chrome trace and peak memory."""
    checkpoint_storage: Literal["shared", "local"] = "shared"
    """`local`: run_dir is another disk on every node; each holds its own ranks' files, and a run resumes on the same nodes."""
    export_every: int = Field(0, ge=0)
    """In steps: a LoRA or a diffusers folder in export/step-*; 0: at the end only, in export/final."""
    resume: str = "auto"
    """`auto` (newest checkpoint of run_dir, if any), `never`, or a checkpoint folder."""


class ValidationConfig(Section):
    """Held-out prompts by the ODE, one sample each, from fixed noise."""

    num_prompts: int = Field(128, ge=1)
    """The first n of data.validation."""
    num_steps: int | None = Field(None, ge=1)
    """null: as the rollout."""
    guidance_scale: float | None = Field(None, ge=1.0)
    """null: as the rollout."""
    seed: int = 42
    """Of the initial noise."""
    batch_size: int = Field(32, ge=1)
    """Prompts in one forward."""
    grid_images: int = Field(32, ge=1)
    """Samples in each grid under samples/, of training samples too."""


class LoggingConfig(Section):
    tensorboard: bool = True
    """Write run_dir/tensorboard."""
    wandb_project: str | None = None
    """null: no W&B."""
    samples_every: int = Field(0, ge=0)
    """Save a grid of training samples, samples/training_*.png, every so many steps; 0: never."""
    prompt_samples: int = Field(12, ge=0)
    """So many validation prompts keep a picture or video of their own at every validation: the same prompt over time."""
    peak_tflops: float | None = Field(None, gt=0)
    """Dense peak of one device in TFLOP/s, for throughput/mfu; null: known for NVIDIA's data-centre GPUs, else no MFU is logged."""


class Config(Section):
    run_dir: str
    """Everything that the run writes. The same command with the same folder resumes."""
    seed: int = Field(0, ge=0)
    """Of prompts, windows, noise and the initial adapters."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: list[RewardConfig] = Field(min_length=1)
    rewarding: RewardingConfig = RewardingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    ema: EmaConfig = EmaConfig()
    trainer: TrainerConfig = TrainerConfig()
    validation: ValidationConfig = ValidationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if self.model.train == "full" and self.model.dtype == "float16":
            raise ValueError(
                "model.dtype float16 cannot be trained in full (gradients underflow); use bfloat16 or float32"
            )
        rollout = self.rollout
        if rollout.overlap and rollout.backend == "in_process":
            raise ValueError(
                "rollout.overlap needs servers that sample while the trainer trains: rollout.backend vllm_omni"
            )
        if rollout.overlap and self.algorithm.old_log_probs == "trainer":
            raise ValueError(
                "rollout.overlap needs the rollout's own log-probs for its correction; algorithm.old_log_probs trainer would leave the ratio at 1"
            )
        if rollout.overlap and rollout.colocated:
            raise ValueError(
                "rollout.overlap and rollout.colocated exclude each other: a sleeping server cannot sample"
            )
        engine = self.engine
        for name, value in (("parameters", engine.offload_parameters), ("optimizer", engine.offload_optimizer)):
            if value == "nvme" and engine.nvme_path is None:
                raise ValueError(f"engine.offload_{name} nvme needs engine.nvme_path, a folder on a local NVMe disk")
        if engine.offload_parameters != "none" and (engine.zero_stage < 3 or engine.frozen_base == "replicated"):
            raise ValueError(
                f"engine.offload_parameters {engine.offload_parameters} needs zero_stage 3 and frozen_base partitioned"
            )
        if engine.offload_optimizer != "none" and engine.zero_stage == 0:
            raise ValueError("engine.offload_optimizer needs zero_stage 1, 2 or 3")
        averages = self.ema.decay is not None or self.algorithm.old_policy != "copy"
        if engine.offload_optimizer == "nvme" and (engine.zero_stage < 3 or averages):
            raise ValueError(
                "engine.offload_optimizer nvme needs zero_stage 3 and ema.decay null (the average reads the master weights at every update),"
                " and algorithm.old_policy copy"
            )
        # The other ranks wait in a collective meanwhile, and must not take that for a hang.
        waits = {"rewarding.patience_s": self.rewarding.patience_s}
        if rollout.backend == "vllm_omni":
            waits["rollout.server.request_timeout_s"] = rollout.server.request_timeout_s
        for name, seconds in waits.items():
            if seconds >= engine.timeout_s:
                raise ValueError(
                    f"{name} {seconds:g} must be less than engine.timeout_s {engine.timeout_s:g}, after which a rank that waits ends the job"
                )
        window = self.rollout.window
        if window.size is not None and window.range is not None and window.range[1] - window.range[0] < window.size:
            raise ValueError(
                f"rollout.window.size {window.size} does not fit into rollout.window.range {window.range}; widen the range or shrink the window"
            )
        return self

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump()))
