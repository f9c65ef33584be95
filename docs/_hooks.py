"""mkdocs hooks: the pages that are made from the code, so that they cannot fall behind it.

configuration.md    every key of flowgrpo_fast.config: type, default, bounds, docstring
support.md          which family with which algorithm, from the tables that tests/test_matrix.py runs
recipes.md          every configs/*.yaml: what it is for, how to run it, what it sets
readme.md, ...      README, CONTRIBUTING and CHANGELOG as pages, to be linked to instead of copied

And on every page, a config key in backticks (`rollout.window.size`) becomes a link to its row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]
# The keys of this checkout, whatever is installed.
sys.path.insert(0, str(ROOT))

from benchmarks.algorithms import RESULTS, found, table  # noqa: E402
from flowgrpo_fast.config import Config, RewardConfig, Section  # noqa: E402
from flowgrpo_fast.config_file import load_config  # noqa: E402
from tests.matrix import ALGORITHMS, BY_ENGINE, FAMILIES  # noqa: E402

INCLUDED = {"readme.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LAUNCH = "deepspeed flowgrpo_fast/train.py --config"
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "configuration.md", content=configuration_page()))
    files.append(File.generated(config, "recipes.md", content=recipes_page()))
    files.append(File.generated(config, "support.md", content=support_page()))
    for page, source in INCLUDED.items():
        files.append(File.generated(config, page, content=without_outside_links((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return markdown if page.file.src_uri == "configuration.md" else linked_keys(markdown)


# --- Support ---


def support_page() -> str:
    """Every cell of the first column is a test of tests/test_matrix.py; every one of the second names its test."""
    lines = [
        "# Support",
        "",
        "What has been run with what; this page is made from the tables that `tests/test_matrix.py` runs. **tiny**: a step of LoRA on a random pipeline of the family, built",
        "offline, on a CPU, with guidance where the algorithm's users have it. The family's network, VAE, text encoders and schedule are diffusers' own, compared with diffusers'",
        "pipeline (`tests/test_families.py`, `tests/test_editing.py`). **engine**: runs by the real vllm-omni 0.30 on a CPU. **engine samples**: the engine draws what this algorithm needs, with the bits of the",
        "in-process rollout (other families than Qwen-Image: latents to 1e-5, log-probs to 1e-6, full weights and LoRA); no whole run was made. Nothing has been run on a GPU.",
        "",
        "| | " + " | ".join(FAMILIES.values()) + " |",
        "|---" * (len(FAMILIES) + 1) + "|",
    ]
    for algorithm in ALGORITHMS:
        tests = [BY_ENGINE.get((family, algorithm)) for family in FAMILIES]
        cells = ["tiny" if t is None else "tiny, engine samples" if "[" in t else "tiny, engine" for t in tests]
        lines.append(f"| {algorithm} | " + " | ".join(cells) + " |")
    lines += ["", "By the engine:", ""]
    lines += [f"- {FAMILIES[family]}, {algorithm}: `tests/{test}`" for (family, algorithm), test in BY_ENGINE.items()]
    lines += [
        "",
        "Z-Image: the engine's own pipeline takes no dimensions but the 6 B checkpoint's and its attention no mask; ours reads the checkpoint's config and makes a forward for each",
        "padded length of text. Not run: FLUX.2-klein, which the engine has and we have not (its pipelines read layers 9, 18 and 27 of the text encoder: a tiny one would need 28).",
        "",
    ]
    lines += [
        "## Does it learn?",
        "",
        "Twelve steps of the demo (glyphs, full fine-tuning, from the same weights) by each algorithm, three seeds: mean reward and share of exactly right texts in validation, before and after. Two runs",
        "side by side on two cores, one thread each: `python -m benchmarks.algorithms --seeds 0,1,2 engine.threads=1 rewarding.workers=1`. Settings are each one's own, none was tuned, and learning rate and",
        "budget are FlowGRPO's: this says that they learn, not which is best. With one update per rollout Flow-DPPO has nothing to leave out: its numbers are FlowGRPO's.",
        "",
        table(found(RESULTS)),
        "",
    ]
    return "\n".join(lines)


# --- Configuration ---


def subsection(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, by itself, in a list, or where it is not null."""
    found = [field.annotation]
    while found:
        annotation = found.pop()
        if isinstance(annotation, type) and issubclass(annotation, Section):
            return annotation
        found += get_args(annotation)
    return None


def sections(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """(prefix of its keys, section), outermost first."""
    yield prefix, section
    for name, field in section.model_fields.items():
        inner = subsection(field)
        if inner is not None:
            yield from sections(inner, f"{prefix}{name}.")


def config_keys() -> dict[str, FieldInfo]:
    """Every key with a value: "rollout.window.size" -> its field. Those of the list of rewards are "rewards.name" and so on."""
    return {
        prefix + name: field
        for prefix, section in sections()
        for name, field in section.model_fields.items()
        if subsection(field) is None
    }


def section_names() -> list[str]:
    return [prefix.rstrip(".") for prefix, _ in sections() if prefix]


def configuration_page() -> str:
    parts = [
        "# Configuration",
        "Made from `flowgrpo_fast/config.py` when this site is built. A file sets these keys section by section, and any of them can"
        " follow on the command line as `key=value` (`rollout.window.size=2`, `rollout.window.range=[0,5]`). `extends: other.yaml` builds on"
        " another file; `--dry-run` prints what came of it. An unknown key, a wrong type and a combination that cannot run stop the run"
        " before any work, in one line that names the key and the fix. A key without a default must be given.",
    ]
    for prefix, section in sections():
        name = prefix.rstrip(".")
        rows = [row(prefix, key, field) for key, field in section.model_fields.items() if subsection(field) is None]
        heading = "##" if name.count(".") == 0 else "###"
        parts.append(f"{heading} {name or 'Top level'} {{ #{name or 'top-level'} }}")
        # Not inspect.getdoc: a section without a docstring would show pydantic's.
        if prefix and section.__doc__:
            parts.append(linked_pages(" ".join(section.__doc__.split())))
        if name in lists_of_sections():
            parts.append(
                f"A list: `{name}: [{{...}}, {{...}}]`; on the command line `{name}.0.{next(iter(section.model_fields))}=...`."
            )
        parts.append("\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def lists_of_sections() -> set[str]:
    return {name for name, field in Config.model_fields.items() if get_origin(field.annotation) is list}


def row(prefix: str, key: str, field: FieldInfo) -> str:
    name = prefix + key
    bounds = ", ".join(
        [
            pattern.format(f"{getattr(m, kind):g}")
            for m in field.metadata
            for kind, pattern in BOUNDS.items()
            if hasattr(m, kind)
        ]
    )
    lengths = {getattr(m, kind) for m in field.metadata for kind in ("min_length", "max_length") if hasattr(m, kind)}
    of_length = f" of {lengths.pop()}" if len(lengths) == 1 else ""
    kind = type_name(field.annotation) + of_length + (f", {bounds}" if bounds else "")
    text = linked_keys(linked_pages(" ".join((field.description or "").split())))
    return f"| `{name}`{{ #{name} }} | {kind} | {default(field)} | {text.replace('|', chr(92) + '|')} |"


def default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "**required**"
    return f"`{yaml(field.default)}`"


def yaml(value: Any) -> str:
    """As one would write it in a config."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(yaml(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:g}" if value else "0.0"
    return str(value) if value != "" else '""'


def type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{yaml(choice)}`" for choice in arguments)
    if annotation is type(None):
        return "`null`"
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    # `X | None` and Union[X, None] are one type from Python 3.14 on, and two before.
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(type_name(argument) for argument in arguments)
    return {str: "string", int: "integer", float: "number", bool: "`true` or `false`"}[annotation]


# --- Recipes ---


def recipes() -> list[Path]:
    return sorted((ROOT / "configs").glob("*.yaml"))


def recipes_page() -> str:
    parts = [
        "# Recipes",
        "Made from `configs/` when this site is built. Each is a complete run; change it by `key=value` behind the command, or in a file of your"
        " own that begins with `extends: configs/NAME.yaml`. Add `--dry-run` to see the resolved settings and the batch arithmetic without running.",
    ]
    for path in recipes():
        parts += recipe(path)
    return "\n\n".join(parts) + "\n"


def recipe(path: Path) -> list[str]:
    own: Any = OmegaConf.to_container(OmegaConf.load(path))
    bases = own.pop("extends", [])
    said = comment(path)
    parts = [f"## {path.stem}", *said]
    if f"configs/{path.name}" not in "".join(said):
        wanted = [f"{key}=..." for key, value in flat(load_config(path).model_dump()).items() if value == "???"]
        parts.append("```\n" + " ".join([f"{LAUNCH} configs/{path.name}", *wanted]) + "\n```")
    for base in [bases] if isinstance(bases, str) else bases:
        parts.append(f"Builds on [{Path(base).stem}](#{Path(base).stem}); what is not set here is as there.")
    rows = [f"| `{key}` | `{yaml(value)}` |" for key, value in changed(path).items() if not bases or is_set(own, key)]
    parts.append("\n".join(["| key | other than the default |", "|---|---|", *rows]))
    body = "\n".join(f"    {line}".rstrip() for line in path.read_text().splitlines())
    parts.append(f'??? note "configs/{path.name}"\n\n    ```yaml\n{body}\n    ```')
    return parts


def comment(path: Path) -> list[str]:
    """The comment at the head of the file as paragraphs; what is indented in it as code."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].removeprefix(" "))
    parts: list[list[str]] = []
    for line in lines:
        code = line.startswith("  ")
        if not parts or code != parts[-1][0].startswith("  "):
            parts.append([])
        parts[-1].append(line)
    return [as_code(part) if part[0].startswith("  ") else "\n".join(part) for part in parts]


def as_code(lines: list[str]) -> str:
    return "\n".join(["```", *(line.strip() for line in lines), "```"])


def changed(path: Path) -> dict[str, Any]:
    """Flat keys of a recipe that differ from the defaults."""
    required = {"run_dir": "", "model": {"path": ""}, "data": {"train": ""}, "rollout": {}, "rewards": [{"name": ""}]}
    values, defaults = (flat(c.model_dump()) for c in (load_config(path), Config.model_validate(required)))
    found = {key: value for key, value in values.items() if value != defaults.get(key)}
    if "rewards" in found:
        plain = {name: field.default for name, field in RewardConfig.model_fields.items()}
        found["rewards"] = [{k: v for k, v in reward.items() if v != plain[k]} for reward in found["rewards"]]
    return found


def is_set(values: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" in SECTION_NAMES:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


# --- Links ---

KEYS, SECTION_NAMES = config_keys(), section_names()
CODE = re.compile(r"(?<![\[`])`([a-z_0-9.]+)((?:=|: )[^`]*)?`(?![`\]{])")
FENCE = re.compile(r"^\s*(```|~~~)")


def linked_keys(markdown: str) -> str:
    """Outside code blocks, headings and links: `rollout.window.size` -> a link to it. `=value` or `: value` may follow the key."""

    def link(match: re.Match[str]) -> str:
        known = "." in match[1] and (match[1] in KEYS or match[1] in SECTION_NAMES)
        return f"[{match[0]}](configuration.md#{match[1]})" if known else match[0]

    lines, fenced = [], False
    for line in markdown.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
        lines.append(line if fenced or line.startswith(("#", "    ")) else CODE.sub(link, line))
    return "\n".join(lines)


def linked_pages(text: str) -> str:
    """A page of this folder that a docstring names: docs/vllm_omni.md -> a link."""
    return re.sub(r"`?docs/(\w+)\.md`?", r"[\1](\1.md)", text)


def without_outside_links(markdown: str) -> str:
    """Links of a file in the repository's root: those to docs/ become links between pages, those to other files of the repository text."""

    def inside(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if re.match(r"https?://|#", target):
            return match[0]
        pages = {source: page for page, source in INCLUDED.items()}
        page = target.removeprefix("docs/") if target.startswith("docs/") else pages.get(target.partition("#")[0])
        return f"[{text}]({page})" if page else text

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", inside, markdown)
