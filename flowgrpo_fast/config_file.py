"""A YAML file, what it extends and `key=value` overrides -> Config; everything wrong with them in sentences."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from flowgrpo_fast.config import Config, ConfigError, Section


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads `path`, its `extends:` chain and `key=value` overrides. Raises ConfigError."""
    merged = _read_with_bases(Path(path).expanduser(), ())
    for override in overrides or []:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value (example: trainer.total_steps=10)")
        try:
            parsed = OmegaConf.from_dotlist([f"value={value}"]).value
            OmegaConf.update(merged, key, parsed, merge=False, force_add=True)
        except (OmegaConfBaseException, YAMLError, ValueError, TypeError, KeyError, IndexError) as error:
            raise ConfigError(f"override {override!r} cannot be applied: {error}") from error
    try:
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_config(plain, f"{path} and the command line" if overrides else str(path))


def parse_config(values: Any, origin: str = "config") -> Config:
    """A plain dict -> Config. Raises ConfigError that lists every problem, one line each."""
    if not isinstance(values, dict):
        raise ConfigError(f"{origin}: expected a mapping of sections, got {type(values).__name__}")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [_explain(dict(e)) for e in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(problems)) from error


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> Any:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"extends: {path} extends itself through {' -> '.join(p.name for p in seen)}")
    if not path.is_file():
        raise ConfigError(f"config file not found: {path}")
    try:
        config = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top level")
    bases = config.pop("extends", None) or []
    merged: Any = OmegaConf.create({})
    for base in [bases] if isinstance(bases, str) else bases:
        merged = OmegaConf.merge(merged, _read_with_bases(path.parent / base, (*seen, path)))
    return OmegaConf.merge(merged, config)


def _explain(error: dict[str, Any]) -> str:
    """One pydantic error as a sentence: the key as the user writes it, the value, and the nearest valid key if unknown."""
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = _nearest(error["loc"])
        return f"unknown key {location!r}; " + (f"did you mean {near!r}?" if near else _there_are(error["loc"][:-1]))
    if error["type"] == "missing":
        return f"missing key {location!r}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{location} = {error['input']!r}: {message}" if location else message


def _nearest(location: tuple[Any, ...]) -> str | None:
    """The whole key that was meant: a like one of the same section, else one of any section."""
    here = [".".join(map(str, (*location[:-1], key))) for key in _keys_at(location[:-1])]
    for keys, likeness in ((here, 0.6), (_keys_below(Config), 0.8)):
        by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
        if near := difflib.get_close_matches(str(location[-1]), by_name, n=1, cutoff=likeness):
            return by_name[near[0]]
    return None


def _there_are(location: tuple[Any, ...]) -> str:
    keys = ", ".join(_keys_at(location))
    return f"{'.'.join(map(str, location)) or 'a config'} has {keys}" if keys else "it takes no keys"


def _keys_below(section: type[Section], prefix: str = "") -> list[str]:
    """All keys, outer ones first; of lists of sections not what is inside."""
    keys = [prefix + name for name in section.model_fields]
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            keys += _keys_below(inner, f"{prefix}{name}.")
    return keys


def _keys_at(location: tuple[Any, ...]) -> list[str]:
    section: type[Section] = Config
    for part in location:
        if isinstance(part, int):
            continue
        inner = _section_of(section.model_fields[part].annotation)
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, by itself, in a list, or beside None."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
