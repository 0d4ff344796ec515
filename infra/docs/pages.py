"""Write the pages of the documentation site: docs/, and a reference generated from the code.

    python infra/docs/pages.py <directory>

`make docs` builds the site from them. The directory also gets `mkdocs.yml`, whose navigation
follows the sections of docs/README.md: a page that the index lacks is an error of the build.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

import typer
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "https://github.com/clawstream/clawstream/blob/main"
DECISIONS = ROOT / "docs" / "decisions"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s]+)(\))")
REFERENCE = {
    "settings": "All settings",
    "command-line": "Command line",
    "topics": "Topics",
    "records": "Records",
    "http": "HTTP interface",
}


def main(directory: Path) -> None:
    """Write `directory/pages` and `directory/mkdocs.yml`, in place of what the directory has."""
    pages = directory / "pages"
    if directory.exists():
        if not (directory / "pages" / "README.md").exists() or ROOT.is_relative_to(directory):
            sys.exit(f"{directory} was not written by this command: name another folder")
        shutil.rmtree(directory)
    shutil.copytree(ROOT / "docs", pages)
    for page in pages.rglob("*.md"):
        page.write_text(_on_the_site(ROOT / "docs" / page.relative_to(pages)))
    reference = pages / "reference"
    reference.mkdir()
    for name, lines in {
        "settings": settings(),
        "command-line": command_line(),
        "topics": topics(),
        "records": records(),
        "http": http(),
    }.items():
        text = "\n".join(lines)
        (reference / f"{name}.md").write_text(f"# {REFERENCE[name]}\n\n{text}\n")
    site = yaml.safe_load((Path(__file__).parent / "mkdocs.yml").read_text())
    site |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation()}
    (directory / "mkdocs.yml").write_text(yaml.safe_dump(site, sort_keys=False))


def navigation() -> list[Any]:
    """Return the sections of docs/README.md with their pages, and the generated reference."""
    found: list[Any] = [{"Overview": "README.md"}]
    for line in (ROOT / "docs" / "README.md").read_text().splitlines():
        if line.startswith("## "):
            section: list[Any] = []
            found.append({line[3:].partition(":")[0]: section})
        for _, target, _ in LINK.findall(line):
            if target == "decisions/":
                files = sorted(DECISIONS.glob("*.md"))
                section.append({"Decisions": [f"decisions/{file.name}" for file in files]})
            elif "://" not in target:
                section.append(target)
    generated = [{title: f"reference/{name}.md"} for name, title in REFERENCE.items()]
    return [*found, {"Generated reference": generated}]


def settings() -> Iterator[str]:
    """Yield a table for each section of the settings."""
    from clawstream.schemas.settings import Settings

    yield (
        "A field's name with dots is its name in a YAML file, on the command line "
        "(`gateway.port=8100`)\nand in the environment (`CLAWSTREAM__GATEWAY__PORT=8100`).\n"
    )
    yield from _section("", Settings)


def _section(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    inner = {n: m for n, f in model.model_fields.items() if (m := _model_in(f.annotation))}
    if prefix:
        yield f"## {prefix}\n\n{_said(model)}\n"
    yield "| setting | type | default | when to change it |\n| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        if name not in inner or field.description:
            whole = f"{prefix}.{name}".lstrip(".")
            yield f"| `{whole}` | {_type(field)} | {_default(field)} | {_cell(field.description)} |"
    yield ""
    for name, section in inner.items():
        yield from _section(f"{prefix}.{name}".lstrip("."), section)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings section inside an annotation, such as a list of sections."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model), None)


def _type(field: FieldInfo) -> str:
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    bounds = [
        f"{sign} {getattr(m, kind.__name__.lower())}"
        for m in field.metadata
        for kind, sign in signs.items()
        if isinstance(m, kind)
    ]
    return _cell(", ".join([_type_name(field.annotation), *bounds]))


def _type_name(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(p) for p in parts if p is not NoneType)
    if hasattr(kind, "__metadata__"):
        return _type_name(parts[0])
    if parts:
        inner = ", ".join(_type_name(p) for p in parts if p is not Ellipsis)
        return f"{getattr(origin, '__name__', origin)} of {inner}"
    return str(getattr(kind, "__name__", kind))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, tuple):
        value = list(map(str, value))
    return f"`{_cell(value)}`"


def command_line() -> Iterator[str]:
    """Yield every command with its usage, arguments and options."""
    from clawstream.cli.main import app

    yield "Every command takes settings as `a.b=value` and a file by `--config`.\n"
    root = typer.main.get_group(app)
    yield from _commands(root, typer.Context(root, info_name="clawstream"))


def _commands(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from _commands(command, inner)
            continue
        yield f"## {inner.command_path}\n\n{command.help or ''}\n"
        yield "```text\n" + command.get_usage(inner) + "\n```\n"
        rows = [record for p in command.get_params(inner) if (record := p.get_help_record(inner))]
        if rows:
            yield "| option | meaning |\n| --- | --- |"
            yield from (f"| `{_cell(left)}` | {_cell(right)} |" for left, right in rows)
            yield ""


def topics() -> Iterator[str]:
    """Yield every topic with its partitions, records and configuration."""
    from clawstream.schemas.settings import Settings

    kafka = Settings().kafka
    names, retention = kafka.topics, int(kafka.steps_retention_s * 1000)
    specs = [*names.specs(kafka.partitions, retention), names.ready_batches_spec("run", "train")]
    yield (
        "With the default settings. `claw.ready-batches.run.train` stands for the topic of each "
        "run and channel.\nEach topic is described in [the contract](../contract.md).\n"
    )
    yield "| topic | partitions | records | configuration |\n| --- | --- | --- | --- |"
    for spec in specs:
        kinds = ", ".join(f"[{r.__name__}](records.md#{r.__name__.lower()})" for r in spec.records)
        config = ", ".join(f"`{key}={value}`" for key, value in spec.config.items())
        yield f"| `{spec.name}` | {spec.partitions} | {kinds} | {config} |"


def records() -> Iterator[str]:
    """Yield the fields of every record, from its Avro schema."""
    yield "Records on Kafka are Avro, with the schemas of schemas/avro.\n"
    for path in sorted((ROOT / "schemas" / "avro").glob("*.avsc")):
        yield from _record(json.loads(path.read_text()))


def _record(schema: Any) -> Iterator[str]:
    yield f"## {schema['name']}\n\n{schema.get('doc', '')}\n"
    yield "| field | type | meaning |\n| --- | --- | --- |"
    inner: list[Any] = []
    for field in schema["fields"]:
        kind = _avro(field["type"], inner)
        yield f"| `{field['name']}` | {_cell(kind)} | {_cell(field.get('doc'))} |"
    yield ""
    for part in inner:
        yield from _record(part)


def _avro(kind: Any, inner: list[Any]) -> str:
    """Return the name of an Avro type; appends the records that it defines to `inner`."""
    if isinstance(kind, list):
        return " or ".join(_avro(part, inner) for part in kind)
    if isinstance(kind, str):
        return kind.removeprefix("clawstream.")
    match kind["type"]:
        case "array":
            return f"array of {_avro(kind['items'], inner)}"
        case "map":
            return f"map of {_avro(kind['values'], inner)}"
        case "enum":
            return " or ".join(f"`{symbol}`" for symbol in kind["symbols"])
        case "record":
            inner.append(kind)
            return str(kind["name"])
        case other:
            return _avro(other, inner)


def http() -> Iterator[str]:
    """Yield every route of the gateway, from its OpenAPI page."""
    from clawstream.gateway.app import create_app
    from clawstream.gateway.engines.registry import EngineRegistry
    from clawstream.schemas.settings import Settings

    with tempfile.TemporaryDirectory() as unused:  # the application does not run
        app = create_app(Settings(data_dir=Path(unused)), cast(Any, None), EngineRegistry(()))
    yield (
        "The gateway serves its OpenAPI page at `/openapi.json`. Model calls are also served below "
        "`/v1` and\nbelow `/{trajectory}/{prompt}`, see [sessions](../sessions.md).\n"
    )
    yield "| method | path | summary |\n| --- | --- | --- |"
    for path, methods in sorted(app.openapi()["paths"].items()):
        if path.startswith(("/v1/", "/{trajectory}/{prompt}")) and len(methods) == 1:
            continue
        for method, operation in methods.items():
            said = operation.get("description") or operation.get("summary")
            yield f"| {method.upper()} | `{path}` | {_cell(str(said).partition(chr(10))[0])} |"


def _on_the_site(page: Path) -> str:
    """Return the text of a page; its links that leave docs/ go to the sources."""

    def moved(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        path, hash_, anchor = target.partition("#")
        file = (page.parent / path).resolve()
        if not path or "://" in path or not file.exists():
            return link.group()
        if file == DECISIONS:
            return f"{before}decisions/{min(DECISIONS.glob('*.md')).name}{after}"
        if file.is_relative_to(ROOT / "docs"):
            return link.group()
        return f"{before}{SOURCES}/{file.relative_to(ROOT)}{hash_}{anchor}{after}"

    return LINK.sub(moved, page.read_text())


def _said(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def _cell(value: Any) -> str:
    return " ".join(str("" if value is None else value).split()).replace("|", "&#124;")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python infra/docs/pages.py <directory>")
    main(Path(sys.argv[1]).resolve())
