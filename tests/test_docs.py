"""The site of docs/: it builds, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flowgrpo_fast.config import Config
from flowgrpo_fast.config_file import load_config

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flowgrpo_fast"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a link, an anchor or a page of the navigation that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def config_keys(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """From pydantic's JSON schema, a list's element under the list's name."""
    for name, value in schema["properties"].items():
        reference = value.get("$ref") or value.get("items", {}).get("$ref")
        if reference is None:
            yield prefix + name
        else:
            yield from config_keys(definitions[reference.rpartition("/")[2]], definitions, f"{prefix}{name}.")


SCHEMA = Config.model_json_schema()
KEYS = set(config_keys(SCHEMA, SCHEMA["$defs"]))
SECTIONS = {key.rpartition(".")[0] for key in KEYS} - {""}


def test_every_config_key_has_a_row(site: Path) -> None:
    page = (site / "configuration.html").read_text()
    assert len(KEYS) > 100
    for key in sorted(KEYS):
        assert f'<code id="{key}">{key}</code>' in page, key
    for row in page.split("<tr>"):
        if "<code id=" in row:
            assert not re.search(r"<td>\s*</td>\s*</tr>", row), f"a key without a docstring: {row}"
    # A type with bounds, a default and a docstring, as they stand in config.py.
    row = next(row for row in page.split("<tr>") if 'id="rewarding.max_failure_share"' in row)
    for part in ("number, ≥ 0, ≤ 1", "0.1", "The run stops when more than this share"):
        assert part in row


def test_every_recipe_is_shown_with_how_to_run_it(site: Path) -> None:
    page = (site / "recipes.html").read_text()
    for recipe in RECIPES:
        assert f'<h2 id="{recipe.stem}">' in page
        assert f"--config configs/{recipe.name}" in page


class References(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "source", "video", "iframe", "link"):
            self.found.append(given.get("src") or given.get("href") or "")


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        references = References()
        references.feed(page.read_text())
        assert references.found
        assert not [reference for reference in references.found if re.match(r"(https?:)?//", reference)], page.name
    assert not any("http" in style.read_text().partition("sourceMappingURL")[0] for style in site.rglob("site.css"))


def prose(page: Path) -> str:
    return re.sub(r"^\s*```.*?^\s*```\s*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """What stands in backticks, outside code blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@each_page
def test_links_lead_to_files(page: Path) -> None:
    """Those of docs/ are mkdocs's to check, but for pages that the hook makes, which README could not link to."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file = target.partition("#")[0]
        if page.parent == ROOT and file and "://" not in file:
            assert (ROOT / file).exists(), target


FILE = re.compile(r"[\w./*-]*\w\.(py|yaml|csv|cpp|cu|h|js|css|toml)")
# Of the reader, not of the repository.
THEIRS = {"other.yaml", "configs/NAME.yaml", "X.yaml", "run_dir/config.yaml"}
# Of a run.
OUTPUTS = {"config.yaml"}


@each_page
def test_files_exist(page: Path) -> None:
    """Written from the root, from the package, or by a name alone that is in the package or beside what was named before it."""
    for name in spans(page):
        if not FILE.fullmatch(name) or name in THEIRS | OUTPUTS or "..." in name:
            continue
        places = [ROOT, PACKAGE, ROOT / "csrc", ROOT / "benchmarks"]
        found = any(list(place.glob(name)) for place in places) or ("/" not in name and list(PACKAGE.rglob(name)))
        assert found, f"{page.name} names {name}, which does not exist"


@each_page
def test_dotted_names_exist(page: Path) -> None:
    for name in set(re.findall(r"\bflowgrpo_fast(?:[.:]\w+)+", page.read_text())) - {"flowgrpo_fast.git"}:
        assert is_defined(name.replace(":", ".").split(".")), f"{page.name} names {name}, which does not exist"


def is_defined(parts: list[str]) -> bool:
    """A module, or a name at the top level of one; read, not imported."""
    for cut in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:cut])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.is_file():
            continue
        if cut == len(parts):
            return True
        return cut == len(parts) - 1 and parts[-1] in top_level(file)
    return False


def top_level(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@each_page
def test_config_keys_are_keys(page: Path) -> None:
    top = {key.partition(".")[0] for key in KEYS if "." in key}
    for span in spans(page):
        match = re.match(r"([a-z_]+(?:\.[a-z_0-9]+)+)\b(?!/)", span)
        if match is None or match[1].partition(".")[0] not in top or FILE.fullmatch(span):
            continue
        key = re.sub(r"\.\d+(?=\.|$)", "", match[1])
        if key.endswith((".json", ".jsonl", ".html", ".md", ".pid", ".log")) or span.endswith(")"):
            continue
        known = key in KEYS | SECTIONS or key.startswith("rollout.server.engine.")
        assert known, f"{page.name} names {span}, which is no config key"


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    defined = {
        m for file in (ROOT / "tests").glob("*.py") for m in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    for span in spans(page):
        if re.fullmatch(r"test_\w+", span):
            assert span in defined, f"{page.name} names {span}, which does not exist"


@each_page
def test_commands_have_real_configs_and_keys(page: Path) -> None:
    """`--config configs/X.yaml key=value ...` loads."""
    for line in page.read_text().splitlines():
        match = re.search(r"--config (configs/\w+\.yaml)([^`#|]*)", line)
        if match is None:
            continue
        overrides = [
            word.strip('"') for word in match[2].split() if re.match(r"[a-z_.0-9]+=", word) and "..." not in word
        ]
        load_config(ROOT / match[1], ["model.path=builtin:glyphs", "data.train=builtin:glyphs", *overrides])


@each_page
def test_python_examples_run(page: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(code, {})


def test_every_metric_is_explained() -> None:
    """Every name that stands in the trainer's code, and the phases that it times."""
    text = (ROOT / "docs" / "watching.md").read_text()
    named: set[str] = set()
    for file in ("trainer.py", "scoring.py", "agreement.py", "throughput.py", "profile.py"):
        code = (PACKAGE / file).read_text()
        named |= set(
            re.findall(
                r'"((?:reward|advantage|policy|optimizer|rollout|agreement|timing|throughput|memory)/\w+)"', code
            )
        )
        named |= {f"timing/{phase}_s" for phase in re.findall(r'timer(?:\.add)?\("(\w+)"', code)}
    assert len(named) > 20
    from flowgrpo_fast.ops.policy_loss import METRICS

    for name in sorted(named | {f"policy/{metric}" for metric in METRICS}):
        assert f"`{name}`" in text, name


def test_what_may_change_on_resume_is_listed() -> None:
    text = " ".join((ROOT / "docs" / "scale.md").read_text().split())
    listed = text[text.index("Free to change:") : text.index("## How a run ends early")]
    for node in ast.parse((PACKAGE / "checkpoint.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FREE_TO_CHANGE":
            free = set(ast.literal_eval(node.value))
    assert free == set(re.findall(r"`([\w.]+)`", listed)) - {"trainer.total_steps"}
