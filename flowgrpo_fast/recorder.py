"""What a run leaves on the disk besides checkpoints: metrics, sample pictures, exports, summary and report."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from flowgrpo_fast import comm
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.engine import LORA, Engine
from flowgrpo_fast.export import save_lora, save_pipeline
from flowgrpo_fast.metrics import MetricsWriter, write_atomic
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.report import write_report
from flowgrpo_fast.rollout.agent_loop import RolloutResult
from flowgrpo_fast.samples import image_grid, write_prompt_samples
from flowgrpo_fast.version import installed_versions

PACKAGES = ("torch", "deepspeed", "diffusers", "transformers", "peft", "rapidocr", "flowgrpo_fast")


class Recorder:
    """All ranks construct it. Rank 0 writes what there is one of; each rank its own prompts' samples."""

    def __init__(self, config: Config, run_dir: Path, resume_step: int | None, device: torch.device) -> None:
        """Raises ConfigError, on every rank, where rank 0 cannot write."""
        self.config, self.run_dir, self.device = config, run_dir, device
        self.is_main = comm.rank() == 0
        self.writer = comm.together(lambda: self._open(resume_step) if self.is_main else None, device)

    def _open(self, resume_step: int | None) -> MetricsWriter:
        try:
            writer = MetricsWriter(
                self.run_dir,
                tensorboard=self.config.logging.tensorboard,
                wandb_project=self.config.logging.wandb_project,
                config=self.config.model_dump(),
                resume_step=resume_step,
            )
            (self.run_dir / "config.yaml").write_text(self.config.to_yaml())
        except (ValueError, OSError) as problem:
            raise ConfigError(f"run_dir {self.run_dir}: {problem}") from problem
        return writer

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        comm.together(lambda: None if self.writer is None else self.writer.log(step, metrics), self.device)

    def grid(self, step: int, name: str, result: RolloutResult, scores: list[float]) -> None:
        """samples/<name>.png of rank 0's first samples."""
        comm.together(lambda: self._grid(step, name, result, scores) if self.is_main else None, self.device)

    def _grid(self, step: int, name: str, result: RolloutResult, scores: list[float]) -> None:
        shown = min(self.config.validation.grid_images, result.batch.size)
        captions = [f"{prompt}  {score:.2f}" for prompt, score in zip(result.prompts, scores, strict=True)]
        # The agent loop has raised where there is none.
        assert result.batch.media is not None
        grid = image_grid(result.batch.media[:shown].cpu(), captions[:shown])
        folder = self.run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        grid.save(folder / f"{name}.png")
        if self.writer is not None:
            self.writer.log_images(step, f"samples/{name}", grid)

    def prompts(self, name: str, first: int, turns: int, result: RolloutResult, scores: list[float]) -> None:
        """samples/prompts/<index>/<name>.png|mp4 for the first validation prompts, `first` being this rank's first."""
        shown = max(0, min(result.batch.size // turns, self.config.logging.prompt_samples - first))
        if not shown or result.batch.media is None:
            return
        # The last turn of each prompt is its answer.
        rows = [i * turns + turns - 1 for i in range(shown)]
        write_prompt_samples(
            self.run_dir / "samples",
            name,
            result.batch.media[rows].cpu(),
            [first + i for i in range(shown)],
            [f"{result.prompts[row]}\n{scores[row]:.2f}" for row in rows],
        )

    def export(self, name: str, engine: Engine, adapter: ModelAdapter) -> None:
        """run_dir/export/<name>: a LoRA or a diffusers folder, of the average where there is one to sample from. A collective."""
        out = self.run_dir / "export" / name
        with engine.sampling_weights():
            if self.config.model.train == "lora":
                trained = engine.trained_state()
                work = lambda: save_lora(adapter, engine.peft_config(LORA), trained, out)  # noqa: E731
                comm.together(lambda: work() if self.is_main else None, self.device)
            else:
                sizes = engine.parameter_bytes()
                comm.together(
                    lambda: save_pipeline(adapter, sizes, engine.gather_to_main, out, is_writer=self.is_main),
                    self.device,
                )

    def summary(
        self,
        before: dict[str, float],
        after: dict[str, float],
        engine: Engine,
        first_ratio: float | None,
        seconds: dict[str, float],
    ) -> None:
        """summary.json and report.html. Called at the end."""
        if self.writer is None:
            return
        self.close()
        summary: dict[str, object] = {
            "recipe": self.run_dir.name,
            "steps": self.config.trainer.total_steps,
            "seed": self.config.seed,
            "world_size": comm.world_size(),
            "trainable_parameters": engine.trainable_parameters,
            "first_update_ratio_max_deviation": first_ratio,
            **seconds,
            "versions": {"python": platform.python_version(), "device": str(self.device)}
            | installed_versions(PACKAGES),
        }
        summary |= {f"validation/before/{name}": value for name, value in before.items()}
        summary |= {f"validation/after/{name}": value for name, value in after.items()}
        write_atomic(self.run_dir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        report = write_report(self.run_dir)
        for name, value in after.items():
            print(f"validation {name}: {before[name]:.3f} -> {value:.3f}")
        print(f"report: {report}")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
