"""The engine in one rank: loading into partitions, EMA, skipped updates, offload, exports. Several ranks: test_scaling.py."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.ops.op_builder import AsyncIOBuilder
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo_fast.algorithms.flow_grpo import FlowGRPO
from flowgrpo_fast.config import Config, ConfigError, SigmasConfig
from flowgrpo_fast.engine import deepspeed_config
from flowgrpo_fast.engine.ema import Masters
from flowgrpo_fast.engine.loading import LORA as LORA_NAME
from flowgrpo_fast.engine.loading import add_lora, load_partitioned
from flowgrpo_fast.export import main as export
from flowgrpo_fast.export import save_lora
from flowgrpo_fast.inputs import Inputs, validation_params
from flowgrpo_fast.memory import MASTER, MOMENTS, WEIGHTS, count_parameters, memory_lines, memory_per_rank
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.models import build_adapter
from flowgrpo_fast.models.qwen_image import QwenImageAdapter
from flowgrpo_fast.plan import batch_plan
from flowgrpo_fast.rollout.in_process import InProcessRollout
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.tiny import CPU, exported, request, tiny_config, tiny_pipeline

LORA = ("model.train=lora", "model.lora.rank=4", "model.lora.alpha=8.0")
QUICK = ("data.validation=null", "engine.threads=1")


@pytest.fixture(scope="module", autouse=True)
def in_one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


def train(config: Config) -> Trainer:
    trainer = Trainer(config, Inputs(config, 1), CPU)
    trainer.run()
    return trainer


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_partitioned_load_is_the_network_that_diffusers_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    """Several shards with an index; every parameter, and the tables that are none (a bf16 `zero.Init` casts what constructors make)."""
    folder = tmp_path / "model"
    stock = QwenImageTransformer2DModel.from_pretrained(tiny_pipeline() / "transformer")
    for part in tiny_pipeline().iterdir():
        if part.name != "transformer":
            (folder / part.name).parent.mkdir(exist_ok=True)
            (folder / part.name).symlink_to(part)
    stock.save_pretrained(folder / "transformer", max_shard_size="100KB")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    config = tiny_config(tmp_path / "run", *QUICK)
    adapter = QwenImageAdapter(folder, CPU, dtype)
    network = load_partitioned(adapter, deepspeed_config(config, batch_plan(config, 1, 1)))
    import deepspeed

    expected = adapter.load_transformer()
    with deepspeed.zero.GatheredParameters(list(network.parameters())):
        assert_equal(dict(network.named_parameters()), dict(expected.named_parameters()))
    for name in ("pos_freqs", "neg_freqs"):
        assert torch.equal(getattr(network.pos_embed, name), getattr(expected.pos_embed, name)), name


def test_files_that_do_not_fit_the_network(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    for part in tiny_pipeline().iterdir():
        if part.name != "transformer":
            (folder / part.name).symlink_to(part)
    settings = json.loads((tiny_pipeline() / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(
        json.dumps(settings | {"num_layers": settings["num_layers"] + 1})
    )
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").symlink_to(
        tiny_pipeline() / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    config = tiny_config(tmp_path / "run", *QUICK)
    with pytest.raises(ConfigError, match=r"does not fit its own config.json: \d+ parameter\(s\) missing"):
        load_partitioned(
            QwenImageAdapter(folder, CPU, torch.float32), deepspeed_config(config, batch_plan(config, 1, 1))
        )


def test_a_file_of_another_shape_is_refused_before_any_rank_waits(tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(tiny_pipeline(), folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["img_in.weight"] = tensors["img_in.weight"][:, :-1].contiguous()
    save_file(tensors, file)
    config = tiny_config(tmp_path / "run", *QUICK)
    with pytest.raises(
        ConfigError, match=r"model.path: img_in.weight is \[\d+, 63\] in the file and \[\d+, 64\] in the network"
    ):
        load_partitioned(
            QwenImageAdapter(folder, CPU, torch.float32), deepspeed_config(config, batch_plan(config, 1, 1))
        )


EMA = ("ema.decay=0.6", "ema.warmup=false")


@pytest.mark.parametrize("kind", ["full", "lora", "full-bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_average_is_of_the_weights_and_goes_as_it_came(tmp_path: Path, stage: int, kind: str) -> None:
    """Against an average by hand; parameters above and below the persistence threshold; swapped in, out, bitwise."""
    settings = {"full": (), "lora": LORA, "full-bf16": ("model.dtype=bfloat16",)}[kind]
    config = tiny_config(
        tmp_path, *QUICK, *EMA, *settings, f"engine.zero_stage={stage}", "engine.persistence_threshold=500"
    )
    trainer = Trainer(config, Inputs(config, 1), CPU)
    engine = trainer.engine
    by_hand = {name: t.float() for name, t in engine.trained_state().items()}
    step = engine.step

    def averaging_step() -> Any:
        result = step()
        for name, t in engine.trained_state().items():
            by_hand[name] += 0.4 * (t.float() - by_hand[name])
        return result

    engine.step = averaging_step
    trainer.run()
    raw = engine.trained_state()
    with engine.sampling_weights():
        average = engine.trained_state()
    assert_equal(engine.trained_state(), raw)
    assert any(not torch.equal(average[name], raw[name]) for name in raw)
    for name, t in average.items():
        # Averages of bf16 weights here, of their fp32 master there.
        tolerance = 1e-2 if t.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(t.float(), by_hand[name], rtol=tolerance, atol=1e-4 if tolerance > 1e-3 else 1e-7)
    # What is below the persistence threshold moves too.
    assert any(not torch.equal(average[name], raw[name]) for name in raw if raw[name].numel() <= 500)


def test_validation_samples_the_average_and_the_export_holds_it(tmp_path: Path) -> None:
    decay = ("ema.decay=0.99", "ema.warmup=false", "engine.threads=1", *LORA, "optimizer.learning_rate=0.01")
    raw, averaged = tmp_path / "raw", tmp_path / "averaged"
    train(tiny_config(raw, *decay, "ema.sample=false"))
    train(tiny_config(averaged, *decay))
    mine, theirs = read_metrics(raw), read_metrics(averaged)
    assert [row["optimizer/grad_norm"] for row in mine] == [row["optimizer/grad_norm"] for row in theirs]
    assert mine[-1]["validation/reward"] != theirs[-1]["validation/reward"]
    assert any(not torch.equal(t, exported(averaged)[name]) for name, t in exported(raw).items())


@pytest.mark.parametrize(("stage", "settings"), [(0, ()), (1, ()), (2, ("model.dtype=bfloat16",)), (3, ()), (3, ("model.dtype=bfloat16",)), (3, LORA)])  # fmt: skip
def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, settings: tuple[str, ...]
) -> None:
    config = tiny_config(tmp_path, *QUICK, *settings, "ema.decay=0.5", f"engine.zero_stage={stage}")
    trainer = Trainer(config, Inputs(config, 1), CPU)
    loss, weights = FlowGRPO.loss, []

    def poisoned(self: FlowGRPO, inputs: Any) -> Any:
        value, log_prob, metrics = loss(self, inputs)
        return value * (math.nan if trainer.state.step == 1 else 1.0), log_prob, metrics

    monkeypatch.setattr(FlowGRPO, "loss", poisoned)
    step = trainer.engine.step

    def watched() -> Any:
        result = step()
        weights.append(trainer.engine.trained_state())
        return result

    trainer.engine.step = watched
    trainer.run()
    assert [row["optimizer/skipped"] for row in read_metrics(tmp_path)] == [0.0, 1.0, 0.0]
    assert_equal(weights[0], weights[1])
    assert any(not torch.equal(weights[1][name], t) for name, t in weights[2].items())
    assert trainer.engine.updates == trainer.engine.ema.updates == 2


def test_coalesced_gradients_are_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four micro-batches an update, reduced each or once."""
    coalesced, coalesce_grad_reduction = [], DeepSpeedEngine.coalesce_grad_reduction
    monkeypatch.setattr(
        DeepSpeedEngine, "coalesce_grad_reduction", lambda e: (coalesced.append(e), coalesce_grad_reduction(e))[1]
    )
    cut = (*QUICK, "engine.micro_batch_size=4", "optimizer.max_grad_norm=1e9")
    for coalesce in ("true", "false"):
        train(tiny_config(tmp_path / coalesce, *cut, f"engine.coalesce_gradients={coalesce}"))
        assert len(coalesced) == 3, "once an update, in the first run alone"
    for a, b in zip(read_metrics(tmp_path / "true"), read_metrics(tmp_path / "false"), strict=True):
        assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-5)
    with pytest.raises(ConfigError, match="coalesce_gradients needs fp32 gradients"):
        train(tiny_config(tmp_path / "no", *cut, "model.dtype=bfloat16", "engine.coalesce_gradients=true"))


def test_a_replicated_base_trains_the_same_adapter(tmp_path: Path) -> None:
    for where in ("replicated", "partitioned"):
        trainer = train(tiny_config(tmp_path / where, *QUICK, *LORA, f"engine.frozen_base={where}"))
        frozen = next(p for p in trainer.engine.module.parameters() if not p.requires_grad)
        assert (frozen.numel() > 0) == (where == "replicated")
    for a, b in zip(read_metrics(tmp_path / "replicated"), read_metrics(tmp_path / "partitioned"), strict=True):
        assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-4)


def test_offload_to_the_cpu_trains_the_same(tmp_path: Path) -> None:
    offload = ("engine.offload_parameters=cpu", "engine.offload_optimizer=cpu", "ema.decay=0.5")
    trainer = train(tiny_config(tmp_path / "offload", *QUICK, *offload))
    assert trainer.engine.engine.zero_offload_param().device == "cpu"
    assert trainer.engine.engine.zero_offload_optimizer().device == "cpu"
    train(tiny_config(tmp_path / "plain", *QUICK, "ema.decay=0.5"))
    for a, b in zip(read_metrics(tmp_path / "offload"), read_metrics(tmp_path / "plain"), strict=True):
        assert a["policy/first_ratio_max_deviation"] == b["policy/first_ratio_max_deviation"] == 0.0
        assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.offload_parameters=nvme"], "needs engine.nvme_path"),
        (["engine.offload_parameters=nvme", "engine.nvme_path=/nowhere"], "engine.nvme_path = '/nowhere' is no folder"),
        (["engine.offload_parameters=cpu", "engine.zero_stage=2"], "needs zero_stage 3"),
        (["engine.offload_optimizer=cpu", "engine.zero_stage=0"], "needs zero_stage 1, 2 or 3"),
        (["engine.offload_optimizer=nvme", "engine.nvme_path=/tmp", "ema.decay=0.9"], "ema.decay null"),
        (["engine.sequence_parallel_size=2"], "sequence_parallel_size 2 does not divide 1 rank"),
    ],
)
def test_engine_settings_that_cannot_be(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny_config(tmp_path, *overrides))


def test_compiled_blocks_train_with_the_trainers_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled forwards round differently; the ratio is 1 by construction, and the difference is reported."""
    # A compilation that was killed leaves half a library in the shared cache.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # Noise per sample: all forwards of the rollout have one shape, and each shape is 20 s of compilation.
    trainer = train(
        tiny_config(
            tmp_path, *QUICK, "engine.compile_blocks=true", "trainer.total_steps=1", "rollout.initial_noise=sample"
        )
    )
    assert all(block._compiled_call_impl is not None for block in trainer.engine.module.transformer_blocks)
    for row in read_metrics(tmp_path):
        assert row["policy/ratio_max_deviation"] == 0.0
        assert 0.0 <= row["rollout/log_ratio_max"] < 1e-4


@pytest.mark.parametrize("kind", ["full", "lora", "full-bf16", "lora-bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_arithmetic_is_of_what_the_engine_holds(tmp_path: Path, stage: int, kind: str) -> None:
    """One rank, after a step; padding apart."""
    settings = {
        "full": (),
        "lora": LORA,
        "full-bf16": ("model.dtype=bfloat16",),
        "lora-bf16": (*LORA, "model.dtype=bfloat16"),
    }
    config = tiny_config(tmp_path, *QUICK, *settings[kind], f"engine.zero_stage={stage}", "trainer.total_steps=1")
    trainer = Trainer(config, Inputs(config, 1), CPU)
    trainer.run()
    counted = count_parameters(config, trainer.adapter)
    expected = memory_per_rank(config, counted, 1)
    network, optimizer = trainer.engine.module, trainer.engine.engine.optimizer
    assert counted.total == sum(trainer.engine.numel(p) for p in network.parameters())
    assert counted.trained == trainer.engine.trainable_parameters
    held = [p.ds_tensor if stage == 3 else p for p in network.parameters()]
    assert sum(t.numel() * t.element_size() for t in held) == pytest.approx(expected[WEIGHTS], rel=0.01)
    masters = Masters(trainer.engine.engine, stage)
    master = 0 if masters.plain else sum(t.numel() * t.element_size() for t in masters.shards())
    assert master == pytest.approx(expected[MASTER], rel=0.01)
    states = (optimizer if masters.plain else optimizer.optimizer).state.values()
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    assert sum(t.numel() * t.element_size() for t in moments) == pytest.approx(expected[MOMENTS], rel=0.01)
    trainer.engine.close()


def test_offload_to_nvme_without_libaio_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    config = tiny_config(tmp_path, "engine.offload_parameters=nvme", f"engine.nvme_path={tmp_path}")
    with pytest.raises(ConfigError, match="needs libaio's headers.*apt-get install libaio-dev"):
        deepspeed_config(config, batch_plan(config, 1, 1))


def test_memory_of_a_network_of_20_billion_parameters_is_known_without_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *LORA, "model.lora.rank=64", "model.dtype=bfloat16", "ema.decay=0.9")

    class QwenImage(QwenImageAdapter):
        def build_transformer(self) -> QwenImageTransformer2DModel:
            return QwenImageTransformer2DModel()

    counted = count_parameters(config, QwenImage(tiny_pipeline(), CPU, torch.bfloat16))
    assert counted.total - counted.trained == 20_430_401_088
    partitioned = memory_per_rank(config, counted, 8)
    assert partitioned[WEIGHTS] == (20_430_401_088 * 2 + counted.trained * 4) // 8
    assert partitioned["average"] == counted.trained * 4 // 8
    lines = memory_lines(config, counted, 8)
    assert "frozen_base partitioned" in lines[1]
    assert lines[2].split() == [
        "weights",
        f"{partitioned[WEIGHTS] / 2**30:.2f}",
        f"{8 * partitioned[WEIGHTS] / 2**30:.2f}",
    ]


def test_deterministic_is_a_switch_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(False)
    settle_environment(tiny_config(tmp_path, "engine.deterministic=true", "engine.threads=1"), None)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def lora_run(tmp_path: Path) -> tuple[Path, Config, int]:
    """Its folder, its config, and the number of parameters it trained."""
    config = tiny_config(
        tmp_path / "run", *LORA, "rollout.guidance_scale=3.0", "data.negative_prompt=blurry and of low quality", "engine.threads=1", "ema.decay=0.5", "trainer.save_every=2", "trainer.export_every=2", "optimizer.learning_rate=0.05",
    )  # fmt: skip
    return tmp_path / "run", config, train(config).engine.trainable_parameters


def test_a_lora_export_in_plain_diffusers_gives_the_validation_images(
    lora_run: tuple[Path, Config, int], tmp_path: Path
) -> None:
    """`pipe.load_lora_weights`, then our sampler over the pipeline's transformer: the run's own validation pictures, bitwise, with guidance by a negative
    prompt of another length. And the file is the adapter's bytes. During training, and from a checkpoint, exports are the same."""
    run_dir, config, trained = lora_run
    folder = run_dir / "export" / "final"
    pipe = QwenImagePipeline.from_pretrained(tiny_pipeline())
    base = {name: t.clone() for name, t in pipe.transformer.named_parameters()}
    pipe.load_lora_weights(folder)
    assert len(base) < len(list(pipe.transformer.named_parameters()))
    adapter = QwenImageAdapter(tiny_pipeline(), CPU, torch.float32)
    rollout = InProcessRollout(adapter, pipe.transformer.eval(), SigmasConfig(), CPU)
    records = Inputs(config, 1).validation_records
    negative = config.data.negative_prompt
    requests = [request(records[i].prompt, i, [0], negative) for i in range(2)]
    batch = rollout.generate(requests, validation_params(config), 0)
    assert batch.images is not None
    for i, image in enumerate(batch.images):
        picture = np.asarray(Image.open(run_dir / "samples" / "prompts" / f"{i:05d}" / "after.png"))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), picture), i
    # The pipeline's own call: other arithmetic in the scheduler, so within one grey level.
    noise = rollout._initial_noise(config.validation.seed, torch.tensor([0]), (16, 64))
    theirs = pipe(
        records[0].prompt, negative_prompt=negative, num_inference_steps=4, height=64, width=64, true_cfg_scale=3.0, latents=noise, output_type="np"
    ).images[0]  # fmt: skip
    ours = batch.images[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(ours - (theirs * 255).round().astype(int)).max() <= 1

    file = folder / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    adapter_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    # On a model of any use the names and the metadata in the header are nothing; on this one they are more than 5 %.
    assert file.stat().st_size - header == adapter_bytes == 4 * trained
    assert export([str(run_dir), "--average"]) == 0
    assert_equal(exported(run_dir, "step-000003"), tensors)
    assert export([str(run_dir), "--step", "2", "--average", "--out", str(tmp_path / "export" / "two")]) == 0
    assert_equal(exported(tmp_path, "two"), exported(run_dir, "step-000002"))


def test_an_adapter_file_is_within_5_percent_of_the_adapters_bytes(tmp_path: Path) -> None:
    """Of glyphs, 2 million parameters: names and metadata weigh the less the larger the network."""
    config = tiny_config(tmp_path, "model.path=builtin:glyphs", "model.train=lora", "model.lora.rank=32")
    adapter = build_adapter("qwen_image", "builtin:glyphs", CPU, torch.float32)
    network: Any = adapter.build_transformer()
    add_lora(network, config, adapter)
    trained = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    save_lora(adapter, network.peft_config[LORA_NAME].to_dict(), trained, tmp_path / "export")
    size = (tmp_path / "export" / "pytorch_lora_weights.safetensors").stat().st_size
    adapter_bytes = sum(t.numel() * t.element_size() for t in trained.values())
    assert adapter_bytes < size < 1.05 * adapter_bytes


def test_a_full_export_is_a_diffusers_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    trainer = train(tiny_config(run_dir, *QUICK, "trainer.save_every=1"))
    pipe = QwenImagePipeline.from_pretrained(run_dir / "export" / "final")
    assert_equal(dict(pipe.transformer.named_parameters()), trainer.engine.trained_state())
    assert export([str(run_dir), "--out", str(tmp_path / "export" / "mine")]) == 0
    assert_equal(exported(tmp_path, "mine"), exported(run_dir))
    assert export([str(run_dir), "--step", "9"]) == 2
    assert "has no checkpoint of step 9; there are: [2, 3]" in capsys.readouterr().err
    assert export([str(run_dir), "--average"]) == 2
    assert "the run had ema.decay null" in capsys.readouterr().err


def test_a_base_model_that_changed_is_noticed(tmp_path: Path) -> None:
    """The frozen part is not in a checkpoint: it is read again, and must be what the adapters were trained on."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_pipeline(), folder)
    settings = (*QUICK, *LORA, f"model.path={folder}")
    train(tiny_config(tmp_path / "run", *settings, "trainer.total_steps=1"))
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["img_in.weight"][0, 0] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="was trained on another base model"):
        train(tiny_config(tmp_path / "run", *settings, "trainer.total_steps=2"))


def test_a_profiled_step_says_where_its_time_went(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, *QUICK, "trainer.profile_steps=[2]"))
    (file,) = (tmp_path / "profile").glob("*.json")
    profile = json.loads(file.read_text())
    parts = profile["parts"]
    assert {"rollout", "encode", "decode", "reward", "forward", "backward", "gather", "optimizer"} <= parts.keys()
    assert parts["rollout"]["seconds"] > parts["encode"]["seconds"] + parts["decode"]["seconds"]
    assert parts["backward"]["calls"] == 2
    inside = sum(parts[name]["seconds"] for name in ("rollout", "forward", "backward", "optimizer"))
    assert inside < profile["step_seconds"]
    assert profile["memory/peak_host_gib"] > 0.1
    import gzip

    (trace,) = (tmp_path / "profile").glob("*_trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"flowgrpo_fast::decode", "flowgrpo_fast::backward"} <= names
