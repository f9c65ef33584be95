"""Names in a config: a registered one, or the user's own `module:attribute`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from flowgrpo_fast.config import ConfigError


def load_named(key: str, name: str, registered: Mapping[str, str]) -> Any:
    """The object behind `name`, the value of config key `key`. `registered`: name -> "module:attribute", imported at this call only.

    Raises ConfigError: an unknown name is answered with the nearest registered one, a failing import with its reason.
    """
    target = registered.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, registered, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{key} = {name!r} is not known; did you mean {near!r}? (your own: module:Class)")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {name!r}: cannot import {target}: {error}") from error
