"""The config: extends, overrides, and one clear sentence for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.config_file import load_config, parse_config
from flowgrpo_fast.plan import batch_plan

CONFIGS = Path(__file__).parent.parent / "configs"
GLYPHS = CONFIGS / "glyphs.yaml"


def config(*overrides: str) -> Config:
    return load_config(GLYPHS, list(overrides))


def test_recipe_loads_and_survives_a_round_trip(tmp_path: Path) -> None:
    loaded = config("trainer.total_steps=7", "optimizer.learning_rate=1e-5", "rollout.window.range=[1,5]")
    assert loaded.trainer.total_steps == 7
    assert loaded.optimizer.learning_rate == 1e-5
    assert loaded.rollout.window.range == [1, 5]
    saved = tmp_path / "saved.yaml"
    saved.write_text(loaded.to_yaml())
    assert load_config(saved) == loaded


def test_extends_merges_sections_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(GLYPHS.read_text())
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nseed: 5\nrollout: {num_steps: 9}\n")
    loaded = load_config(tmp_path / "child.yaml", ["seed=6"])
    assert (loaded.seed, loaded.rollout.num_steps, loaded.rollout.noise_level) == (6, 9, 0.9)


def test_extends_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_step=3", "unknown key 'trainer.total_step'; did you mean 'trainer.total_steps'"),
        ("total_steps=3", "unknown key 'total_steps'; did you mean 'trainer.total_steps'"),
        ("algorithm.learning_rate=1", "unknown key 'algorithm.learning_rate'; did you mean 'optimizer.learning_rate'"),
        ("optimizer.lr=1", "unknown key 'optimizer.lr'; optimizer has learning_rate, .*weight_decay"),
        ("foo=1", "and the command line: unknown key 'foo'; a config has run_dir, "),
        ("rewards.0.nam=ocr", "unknown key 'rewards.0.nam'; did you mean 'rewards.0.name'"),
        ("rollout.window.sise=3", "unknown key 'rollout.window.sise'; did you mean 'rollout.window.size'"),
        ("trainer.total_steps=many", "trainer.total_steps = 'many': .*integer"),
        ("trainer.total_steps=1.5", "trainer.total_steps = 1.5: .*integer"),
        ("rollout.guidance_scale=0.5", "rollout.guidance_scale = 0.5: .*greater than or equal to 1"),
        ("engine.zero_stage=4", "engine.zero_stage = 4"),
        ("rollout.rule=sed", "rollout.rule = 'sed'"),
        ("rollout.window.range=[0,2]", r"window.size 3 does not fit into rollout.window.range \[0, 2\]"),
        ("rewards=[]", "rewards = .*at least 1"),
        ("model.path=null", "model.path = None"),
        ("seed", "not of the form key=value"),
        ("engine.timeout_s=300", "rewarding.patience_s 600 must be less than engine.timeout_s 300"),
    ],
)
def test_mistakes_name_key_value_and_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(override)


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            {
                "run_dir": "x",
                "seed": -1,
                "modle": {},
                "data": {"train": "builtin:glyphs"},
                "rollout": {},
                "rewards": [{"name": "ocr"}],
            }
        )
    text = str(caught.value)
    assert "missing key 'model'" in text
    assert "seed = -1" in text
    assert "did you mean 'model'" in text


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config file not found"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not readable as YAML"):
        load_config(broken)


def test_batch_plan_of_the_recipe() -> None:
    one, two = batch_plan(config(), 1, 3), batch_plan(config("rollout.groups_per_batch=4"), 2, 3)
    assert (one.samples, one.micro_batches * one.micro_batch_size) == (128, 384)
    assert (two.samples, two.rollout_batches, two.micro_batch_size, two.micro_batches) == (64, 1, 64, 3)
    assert one.replays_rollout_shape
    assert not batch_plan(config("engine.micro_batch_size=32"), 1, 3).replays_rollout_shape


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (["algorithm.groups_per_step=7"], 2, r"groups_per_step 7 does not divide by 2 rank\(s\) x .* 1 = 2"),
        (["algorithm.updates_per_rollout=3"], 1, r"groups_per_step 8 does not divide by 1 rank\(s\) x .* 3 = 3"),
        (["rollout.groups_per_batch=3"], 1, r"groups_per_batch 3 does not divide the 8 group\(s\)"),
        (
            ["engine.micro_batch_size=100"],
            1,
            r"micro_batch_size 100 does not divide the 384 .* \(8 groups x 16 trained samples x 3 pairs of each\)",
        ),
    ],
)
def test_impossible_batch_arithmetic_is_one_sentence_with_the_numbers(
    overrides: list[str], world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_plan(config(*overrides), world, 3)


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_a_valid_config(recipe: Path) -> None:
    config = load_config(recipe, ["model.path=builtin:glyphs", "data.train=builtin:glyphs"])
    batch_plan(config, world_size=1, slots=1)
